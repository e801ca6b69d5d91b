"""Tables in a Markdown page, filled only from stored results.

    <!-- filled: privacy mini budgets -->
    | clients | epsilon | ...
    <!-- end -->

`filled` writes the text between the two markers from an experiment, a profile and a kind of table: a caption
and the table (`page_tables`), and its origin (`footnotes`). `fedlora experiment fill PAGE` runs it,
and a test holds every page to it, so no number there was typed.

docs/evidence/experiments.md says what each kind of table (`page_tables.KINDS`) shows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedlora.errors import ConfigError
from fedlora.experiments.claims import Claims
from fedlora.experiments.decided import Decided, decided, still_open
from fedlora.experiments.grid import Grid
from fedlora.experiments.page_tables import KINDS, PLANNED, table_of
from fedlora.experiments.result import Result
from fedlora.experiments.seed_plan import SeedPlan, plan_there
from fedlora.experiments.spec import Experiment, load_experiment
from fedlora.experiments.store import read_failed, read_results
from fedlora.experiments.table_forms import markdown
from fedlora.experiments.table_source import Source

_MARKER = re.compile(r"<!--\s*(filled|end)\b", flags=re.IGNORECASE)  # anything that looks like a marker
_BEGIN = r"^<!-- filled: (?P<asked>[^\n]*?) -->$"  # each marker has its own line
_END = "<!-- end -->"
_BEFORE = ("seeds", "rates")  # the kinds that tell of a plan, not of its runs
_BLOCK = re.compile(rf"({_BEGIN}\n)(?:(?!<!-- filled: ).)*?(^<!-- end -->$)", flags=re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Stored:
    """The source of pages' numbers. results: from `read_results`. claims: the questions; plans: the results' folder
    with the plans. Without both nothing is decided. failed: digest -> reason, for runs that failed on their own.
    planned: a cache, by experiment."""

    experiments: Path
    results: Mapping[str, Result]
    claims: Claims | None = None
    plans: Path | None = None
    failed: Mapping[str, str] = field(default_factory=dict)
    planned: dict[str, Decided] = field(default_factory=dict)

    @classmethod
    def read(cls, experiments: Path, results: Path, claims: Claims | None) -> Stored:
        """Read the folders. Only failures stored with the results count, so that pages are the same wherever they are
        filled."""
        return cls(experiments, read_results(results), claims, results, read_failed(results))

    def named(self, name: str) -> Experiment:
        return load_experiment(self.experiments / f"{name}.toml")

    def decided(self, grid: Grid) -> Decided | None:
        """None if the experiment has no plan, or there are no claims."""
        name = grid.experiment.name
        if self.plans is None or self.claims is None or plan_there(self.plans, name) is None:
            return None
        if name not in self.planned:
            self.planned[name] = decided(self.claims, self.plans, grid, self.named)
        return self.planned[name]


def filled(text: str, stored: Stored) -> str:
    """The page with each block filled from the results; the rest is unchanged.

    Args:
        text: a Markdown page.

    Raises:
        ConfigError: a block names something that does not exist, or has no end.
    """
    if "\r\n" in text:
        return filled(text.replace("\r\n", "\n"), stored).replace("\n", "\r\n")
    meant = [line for line in text.splitlines() if (m := _MARKER.search(line)) and "`" not in line[: m.start()]]
    odd = [line for line in meant if not re.fullmatch(_BEGIN, line) and line != _END]
    if odd:
        raise ConfigError(
            f"a page has a line that looks like a marker but is not one: {odd[0]!r:.120}. Each marker needs its own "
            f"line, without spaces around it: <!-- filled: EXPERIMENT PROFILE KIND --> and {_END}."
        )
    begun = len(re.findall(_BEGIN, text, flags=re.MULTILINE))
    if begun != len(_BLOCK.findall(text)):
        raise ConfigError(f"a page has {begun} blocks '<!-- filled: ... -->', but '<!-- end -->' does not end each.")
    return _BLOCK.sub(lambda found: f"{found[1]}{_block(found['asked'], stored)}{found[3]}", text)


def asked_of(text: str) -> list[tuple[str, str]]:
    """(experiment, profile) of each block on a page."""
    found = [begun.split(" ") for begun in re.findall(_BEGIN, text.replace("\r\n", "\n"), flags=re.MULTILINE)]
    return [(words[0], words[1]) for words in found if len(words) > 1]


def read_page(path: Path) -> str:
    """A page's text. Raises `ConfigError` if it cannot be read."""
    try:
        with path.open(encoding="utf-8", newline="") as page:  # keep its line ends
            return page.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the page {path} cannot be read: {error}.") from error


def _block(asked: str, stored: Stored) -> str:
    name, profile, kind, words = [*asked.split(" ", 3), "", "", "", ""][:4]
    if kind not in KINDS:
        raise ConfigError(
            f"<!-- filled: {asked} --> names an experiment, a profile and one of {', '.join(KINDS)}; got {kind!r}."
        )
    grid = Grid(stored.named(name), profile, stored.results, stored.failed)
    if kind in PLANNED and (stored.plans is None or plan_there(stored.plans, name) is None):
        return "No plan of it is written yet.\n"
    if kind in PLANNED and stored.claims is None:
        raise ConfigError(f"<!-- filled: {asked} --> needs claims, and there are none (--claims).")
    late = "" if stored.plans is None else still_open(stored.plans, grid)
    found, plan = None if late and kind not in _BEFORE else stored.decided(grid), None
    if found is not None and profile == found.plan.profile:
        plan, grid, late = found.plan, found.grid, late or found.late  # further seeds were not planned
    elif found is not None and kind in PLANNED:
        raise ConfigError(f"<!-- filled: {asked} -->: the plan of {name} is for profile {found.plan.profile}.")
    if late and kind not in _BEFORE:
        return f"No number before all planned seeds are there: {late}.\n"
    if not grid.used:
        return f"No run of it is stored yet (0 of {len(grid.runs)}).{_failed(grid)}\n"
    table = table_of(kind, Source(grid, words.strip(), found))
    if not table.rows:
        raise ConfigError(f"<!-- filled: {asked} -->: experiment {name} has nothing on {kind}.")
    below = "".join(f"{line}\n\n" for line in table.below)
    return f"{table.caption}\n\n{markdown(table, aligned=False)}\n{below}{_made(grid, plan)}\n"


def _made(grid: Grid, plan: SeedPlan | None) -> str:
    """How many trainings, from which commits, on which machines, and what failed. plan: for this profile; only its
    seeds then count as intended."""
    there, meant = ({run.digest for run in runs} for runs in ((run for run, _ in grid.used), grid.runs))
    commits = sorted({commit for _, result in grid.used for commit in result.commits(7)})
    made_on = [part.machine for _, result in grid.used for part in result.made]
    machines = sorted({f"{machine.device}, {machine.architecture}" for machine in made_on})
    of = "" if plan is None else f" of the {len(plan.seeds)} seeds planned"
    past = "" if plan is None else " ".join(["", *plan.history])
    return (
        f"`fedlora experiment run {grid.experiment.name} --profile {grid.profile}`: {len(there)} of {len(meant)} runs"
        f"{of}, commit {', '.join(commits)}, {'; '.join(machines)}.{_failed(grid)}{past}"
    )


def _failed(grid: Grid) -> str:
    """Which of the runs, and of their search, failed on their own; empty if none did."""
    each = {run.digest: run for run in [*grid.searches, *grid.runs]}
    lost = [run for digest, run in each.items() if digest in grid.failed and digest not in grid.results]
    words = "; ".join(f"{run.label} ({grid.failed[run.digest]})" for run in lost)
    return f" {len(lost)} failed: {words}." if lost else ""
