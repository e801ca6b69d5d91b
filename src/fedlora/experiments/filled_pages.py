"""Tables in a Markdown page that are filled from stored results, and by nothing else.

    <!-- filled: privacy mini budgets -->
    | clients | epsilon | ...
    <!-- end -->

Between the two markers stands what `filled` makes of an experiment, a profile and a kind of table: a caption
and the table (`page_tables`), and what it rests on (`footnotes`). `fedlora experiment fill PAGE` writes it,
and a test holds every page to it: no number there was typed.

kind                      what
budgets                   an experiment's `budgets`: what each cell spent, and its scores
prices SCORE              an experiment's `peace`: what each row costs without an attacker, and saves with one
scores [NUMBER]           mean ± standard deviation over seeds, of the experiment's number or another ("test, best")
differences [LABEL][: NUMBER]   paired by seed, against the reference or another label
steps [NUMBER]            each label of the first axis against the one before it
losses                    clients' training losses in the last round
decisions FAMILY          verdicts; gates FAMILY: whether LoRA carries the set-ups
seeds, rates              of the plan: how many seeds and why; what the search chose
mechanism                 relative error, norm and rank of merged updates; error and gauge drift of runs
times                     examples trained on, examples a second, hours
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from fedlora.errors import ConfigError
from fedlora.experiments.claims import Claims, load_claims
from fedlora.experiments.decisions import Answers, answers_from
from fedlora.experiments.page_tables import KINDS, PLANNED, Source, table_of
from fedlora.experiments.plan import PlannedRun, mains, searches
from fedlora.experiments.result import Result
from fedlora.experiments.seed_plan import (
    SeedPlan,
    Waiting,
    awaited,
    check_plan,
    open_plans,
    path_of,
    read_plan,
    runs_of,
)
from fedlora.experiments.spec import Experiment, load_all, load_experiment
from fedlora.experiments.store import exists, read_failed, read_results

_MARKER = re.compile(r"<!--\s*(filled|end)\b", flags=re.IGNORECASE)  # anything meant as one
_BEGIN = r"^<!-- filled: (?P<asked>[^\n]*?) -->$"  # markers have lines of their own
_END = "<!-- end -->"
_BLOCK = re.compile(rf"({_BEGIN}\n)(?:(?!<!-- filled: ).)*?(^<!-- end -->$)", flags=re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Stored:
    """Where pages take their numbers from. results: as `read_results` reads them. claims: the file of what is asked;
    plans: the results' folder, in which the plans are. Without the two nothing is decided. failed: digest -> why, of
    runs that failed by themselves. planned: what `_planned` found of an experiment before."""

    experiments: Path
    results: Mapping[str, Result]
    claims: Path | None = None
    plans: Path | None = None
    failed: Mapping[str, str] = field(default_factory=dict)
    planned: dict[str, tuple[SeedPlan, tuple[Answers, ...], Claims]] = field(default_factory=dict)

    @classmethod
    def read(cls, experiments: Path, results: Path, claims: Path) -> Stored:
        """From the folders. What failed is what is kept beside the results: pages say the same wherever they are
        filled."""
        asked = claims if claims.is_file() else None
        return cls(experiments, read_results(results), asked, results, read_failed(results))

    @cached_property
    def waiting(self) -> list[Waiting]:
        """Plans that are open."""
        if self.plans is None:
            return []
        return open_plans(self.plans, load_all(self.experiments), self.results, self.failed)


def filled(text: str, stored: Stored) -> str:
    """The page with each block as the results have it; the rest of it as it was.

    Args:
        text: of a Markdown page.

    Raises:
        ConfigError: a block that asks for what there is not, or has no end.
    """
    if "\r\n" in text:
        return filled(text.replace("\r\n", "\n"), stored).replace("\n", "\r\n")
    meant = [line for line in text.splitlines() if (m := _MARKER.search(line)) and "`" not in line[: m.start()]]
    odd = [line for line in meant if not re.fullmatch(_BEGIN, line) and line != _END]
    if odd:
        raise ConfigError(
            f"a page has a line that looks like a marker and is none: {odd[0]!r:.120}. Markers have lines of their "
            f"own, without a space before or behind: <!-- filled: EXPERIMENT PROFILE KIND --> and {_END}."
        )
    begun = len(re.findall(_BEGIN, text, flags=re.MULTILINE))
    if begun != len(_BLOCK.findall(text)):
        raise ConfigError(f"a page has {begun} blocks '<!-- filled: ... -->', and not each is ended by '<!-- end -->'.")
    return _BLOCK.sub(lambda found: f"{found[1]}{_block(found['asked'], stored)}{found[3]}", text)


def asked_of(text: str) -> list[tuple[str, str]]:
    """(experiment, profile) of each block of a page."""
    found = [begun.split(" ") for begun in re.findall(_BEGIN, text.replace("\r\n", "\n"), flags=re.MULTILINE)]
    return [(words[0], words[1]) for words in found if len(words) > 1]


def read_page(path: Path) -> str:
    """Its text. Raises `ConfigError` where it cannot be read."""
    try:
        with path.open(encoding="utf-8", newline="") as page:  # its own ends of lines
            return page.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the page {path} cannot be read: {error}.") from error


def _block(asked: str, stored: Stored) -> str:
    name, _, rest = asked.partition(" ")
    profile, _, words = rest.partition(" ")
    kind, _, words = words.partition(" ")
    if kind not in KINDS:
        raise ConfigError(
            f"<!-- filled: {asked} --> names an experiment, a profile and one of {', '.join(KINDS)}; got {kind!r}."
        )
    experiment, results = load_experiment(stored.experiments / f"{name}.toml"), stored.results
    source = Source(experiment, profile, results, words.strip(), failed=stored.failed)
    planned = stored.plans is not None and exists(path_of(stored.plans, name))
    if kind in PLANNED and not planned:
        return "No plan of it is written yet.\n"
    if kind in PLANNED and stored.claims is None:
        raise ConfigError(f"<!-- filled: {asked} --> is of what claims ask, and there are none (--claims).")
    if planned and stored.plans is not None and stored.claims is not None:
        if name not in stored.planned:
            stored.planned[name] = _planned(experiment, stored, stored.claims, stored.plans)
        plan, answers, claims = stored.planned[name]
        source = replace(source, plan=plan, answers=answers, claims=claims)
        if profile != plan.profile and kind in PLANNED:
            raise ConfigError(f"<!-- filled: {asked} -->: the plan of {name} is of profile {plan.profile}.")
        if (waiting := _waiting(source)) and kind not in ("seeds", "rates"):
            return waiting
        if profile == plan.profile:  # further seeds of the profile are no part of what the page says was planned
            experiment = experiment.of_first_seeds(profile, len(plan.seeds))
            source = replace(source, experiment=experiment)
    runs = mains(experiment, profile, results, stored.failed)
    if kind not in ("seeds", "rates") and (late := awaited(stored.waiting, {run.digest for run in runs})):
        return f"No number before all planned seeds are there: {late[0].words}.\n"
    if not any(run.result(results) for run in runs):
        return f"No run of it is stored yet (0 of {len(runs)}).{_failed(source, runs)}\n"
    table = table_of(kind, source)
    if not table.rows:
        raise ConfigError(f"<!-- filled: {asked} -->: experiment {name} says nothing of {kind}.")
    below = "".join(f"{line}\n\n" for line in table.below)
    return f"{table.caption}\n\n{markdown(table.columns, table.rows)}\n{below}{_made(source)}\n"


def _waiting(source: Source) -> str:
    """Instead of any number of the planned runs, as long as a family waits for seeds."""
    if source.plan is None or source.profile != source.plan.profile:
        return ""
    late = [one for one in source.answers if not one.complete]
    return f"No number before all planned seeds are there: {late[0].there} of {late[0].wanted}.\n" if late else ""


def _planned(
    experiment: Experiment, stored: Stored, claims_file: Path, plans: Path
) -> tuple[SeedPlan, tuple[Answers, ...], Claims]:
    """The plan, its answers, and what asks."""
    claims, results, failed = load_claims(claims_file), stored.results, stored.failed
    plan = read_plan(path_of(plans, experiment.name))
    known = {experiment.name: experiment}
    gate = claims.gates.get(experiment.name)
    if gate is not None and gate.head_of is not None:
        known[gate.head_of.experiment] = load_experiment(stored.experiments / f"{gate.head_of.experiment}.toml")
    runs = runs_of(claims, experiment, known, plan.profile, plan.seeds, results, failed)
    check_plan(plan, claims, experiment.name, runs)
    answers = answers_from(claims, experiment, known, plan.profile, plan.seeds, results, failed)
    return plan, tuple(answers), claims


def _made(source: Source) -> str:
    """How many trainings, of which seeds, of which commits, on which machines, and what failed. Where there is a plan
    of this profile, its seeds are all that were meant."""
    plan, name, profile = source.plan, source.experiment.name, source.profile
    planned = plan if plan is not None and plan.profile == profile else None
    every = mains(source.experiment, profile, source.results, source.failed)
    runs = [run for run in every if planned is None or run.seed in planned.seeds]
    commits = sorted({commit for _, result in source.used for commit in result.commits(7)})
    made_on = [part.machine for _, result in source.used for part in result.made if part.machine]
    machines = sorted({f"{machine.device}, {machine.architecture}" for machine in made_on})
    of = "" if planned is None else f" of the {len(planned.seeds)} seeds planned"
    past = "" if planned is None else " ".join(["", *planned.history])
    return (
        f"`fedlora experiment run {name} --profile {profile}`: {len({run.digest for run, _ in source.used})} of "
        f"{len({run.digest for run in runs})} runs{of}, commit {', '.join(commits)}, {'; '.join(machines)}."
        f"{_failed(source, runs)}{past}"
    )


def _failed(source: Source, runs: Sequence[PlannedRun]) -> str:
    """Which of the runs, and of their search, failed by themselves; empty where none did."""
    each = {run.digest: run for run in [*searches(source.experiment, source.profile), *runs]}
    lost = [run for digest, run in each.items() if digest in source.failed and digest not in source.results]
    words = "; ".join(f"{run.label} ({source.failed[run.digest]})" for run in lost)
    return f" {len(lost)} failed: {words}." if lost else ""


def failed_here(asked: Iterable[tuple[str, str]], stored: Stored, reports: Mapping[str, str]) -> list[str]:
    """A line for each run of these that failed on this machine alone, which no page says. reports: digest -> why."""
    lines: dict[str, None] = {}
    for name, profile in asked:
        experiment: Experiment = load_experiment(stored.experiments / f"{name}.toml")
        runs = [*searches(experiment, profile), *mains(experiment, profile, stored.results, stored.failed)]
        for run in {run.digest: run for run in runs}.values():
            if run.digest in reports and run.digest not in stored.results:
                lines[f"{name}, {run.label} failed here, which the page does not say: {reports[run.digest]}"] = None
    return list(lines)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, with its last line break."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"

    return line(columns) + "|" + "---|" * len(columns) + "\n" + "".join(line(row) for row in rows)
