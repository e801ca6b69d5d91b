"""The plan of an experiment, in a file: how many seeds, why, and at which rates.

    results/plans/NAME.json    written once by `fedlora experiment plan`, after the search and the pilot

Nothing is decided without it, and nothing before its number of seeds is there. A plan that is written again says so
beside every verdict; what the one before said stands in the history of the repository.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from fedlora.core import files
from fedlora.errors import ConfigError
from fedlora.experiments.claims import Claims, Family, Question
from fedlora.experiments.decisions import Scores, gaps_of
from fedlora.experiments.plan import PlannedRun, at_the_edge, chosen_value, mains, searches
from fedlora.experiments.result import Commit, Part, Result
from fedlora.experiments.spec import Experiment
from fedlora.experiments.store import exists
from fedlora.experiments.verdicts import seeds_needed, weigh


class Rate(Part):
    """What the search chose for the cells `of`, and the score on validation of each value and run tried."""

    of: str
    key: str
    value: float | None
    at_the_edge: str | None
    validation: dict[str, dict[str, float | None]]


class Before(Part):
    """How many of the planned runs had a result when the plan was written."""

    there: int
    of: int


class SeedPlan(Part):
    """A plan's file. asked, runs: digests of what is asked and of the planned runs, by experiment. needed: family ->
    the seeds that it takes. spreads: family -> question -> standard deviation of its gaps in the pilot. results: what
    was there already. before: when earlier plans of it were written, and how many seeds they had."""

    experiment: str
    asked: str
    written: str
    commit: Commit | None
    profile: str
    seeds: list[int]
    needed: dict[str, int]
    spreads: dict[str, dict[str, float]]
    rates: list[Rate]
    runs: dict[str, str] = Field(default_factory=dict)
    results: Before = Before(there=0, of=0)
    before: dict[str, int] = Field(default_factory=dict)

    @property
    def history(self) -> list[str]:
        """What a reader of verdicts has to know of how they came about. Empty for one plan before its runs."""
        count = len(self.before) + 1
        said = [
            f"Plan {k} of {count}, of {written}, had {seeds} seeds. What is said now was planned after it: if its "
            f"runs were seen, no error rate holds."
            for k, (written, seeds) in enumerate(self.before.items(), start=1)
        ]
        if self.results.there:
            said.append(
                f"{self.results.there} of the {self.results.of} planned runs were there when the plan was written: it "
                f"may have been written after they were seen, and then no error rate holds."
            )
        return said


def path_of(results: Path, experiment: str) -> Path:
    """Among the results."""
    return results / "plans" / f"{experiment}.json"


def asked(claims: Claims, experiment: str) -> str:
    """A digest of what decides verdicts: pairs, set-ups, margins, scores, error rates and the gate; not the words."""
    families = {
        name: family.model_dump(mode="json", exclude={"question", "claims"})
        for name, family in claims.of(experiment).items()
    }
    gate = claims.gates.get(experiment)
    told = [families, claims.alpha, claims.power, gate.model_dump(mode="json") if gate else None]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def runs_of(
    claims: Claims,
    experiment: Experiment,
    experiments: Mapping[str, Experiment],
    profile: str,
    seeds: Sequence[int],
    results: Mapping[str, Result],
    failed: Collection[str] = (),
) -> dict[str, str]:
    """Experiment -> a digest of its planned runs: cells, seeds, configurations, mergers; also of the experiment from
    which the gate takes its head. It changes where a label stands for something else than it did."""
    gate = claims.gates.get(experiment.name)
    known = {experiment.name: experiment}
    if gate is not None and gate.head_of is not None:
        known[gate.head_of.experiment] = experiments[gate.head_of.experiment]
    found = {}
    for name, each in known.items():
        runs = [run for run in mains(each, profile, results, failed) if run.seed in seeds]
        told = [[run.seed, sorted(run.cell.items()), run.digest, run.mergers] for run in runs]
        found[name] = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]
    return found


def make_plan(
    claims: Claims,
    experiment: Experiment,
    experiments: Mapping[str, Experiment],
    pilot: Scores,
    results: Mapping[str, Result],
    commit: Any,
    failed: Mapping[str, str] | None = None,
    seen: Mapping[str, Result] | None = None,
) -> SeedPlan:
    """The plan: seeds from the pilot's spreads, the rates with what they were chosen by, which runs these are, and how
    many of them are there already.

    experiments: by name, those that a gate names. seen: all results that there are, those of a changed checkout too.

    A question whose set-up has no pilot takes the largest spread of its pair.

    Raises:
        ConfigError: nobody asks the experiment, or a family has a pair without a pilot.
    """
    families = claims.of(experiment.name)
    if not families:
        raise ConfigError(f"no family asks the experiment {experiment.name}: there is nothing to plan.")
    spreads = {name: spreads_of(name, family, experiment, pilot) for name, family in families.items()}
    needed = needed_seeds(claims, families, spreads)
    wanted = wanted_seeds(families, needed)
    profile = next(iter(families.values())).profile
    seeds = experiment.profile(profile).seeds
    seen = results if seen is None else seen
    planned = [run for run in mains(experiment, profile, results, failed or {}) if run.seed in seeds[:wanted]]
    cells = sum(1 for _ in experiment.cells(profile))
    if len(planned) < cells * len(seeds[:wanted]):
        done = len(planned) // len(seeds[:wanted])
        raise ConfigError(
            f"the search of {experiment.name}, profile {profile}, is not done: {done} of {cells} cells have a value. A "
            f"plan says which runs answer, so run the search first: fedlora experiment run {experiment.called} "
            f"--profile {profile} --seeds {seeds[0]}"
        )
    return SeedPlan(
        experiment=experiment.name, asked=asked(claims, experiment.name), commit=commit,
        written=datetime.now(UTC).isoformat(timespec="seconds"), profile=profile, seeds=seeds[:wanted],
        needed=needed, spreads=spreads, rates=rates(experiment, profile, results, failed or {}),
        runs=runs_of(claims, experiment, experiments, profile, seeds[:wanted], results, failed or {}),
        results=Before(there=sum(run.result(seen) is not None for run in planned), of=cells * len(seeds[:wanted])),
    )  # fmt: skip


def needed_seeds(
    claims: Claims, families: Mapping[str, Family], spreads: Mapping[str, Mapping[str, float]]
) -> dict[str, int]:
    """Family -> seeds with which equal methods are found equivalent, by its largest spread."""
    return {
        name: max(
            seeds_needed(spread, family.margin, len(family.questions), alpha=claims.alpha, power=claims.power)
            for spread in spreads[name].values()
        )
        for name, family in families.items()
    }


def wanted_seeds(families: Mapping[str, Family], needed: Mapping[str, int]) -> int:
    """How many are planned: what the family that needs most may have, and four at least."""
    return max(max(4, min(families[name].cap, n)) for name, n in needed.items() if name in families)


def spreads_of(name: str, family: Family, experiment: Experiment, pilot: Scores) -> dict[str, float]:
    """Question -> the standard deviation of its gaps in the pilot."""
    seeds = experiment.profile(family.pilot).seeds
    there: dict[Question, float] = {}
    for question in family.questions:
        try:
            there[question] = weigh(gaps_of(pilot, question, family.metric, seeds), family.margin).spread
        except KeyError:
            continue
    found = {}
    for question in family.questions:
        alike = [s for q, s in there.items() if (q.first, q.second) == (question.first, question.second)]
        if not alike:
            raise ConfigError(
                f"the pilot of {experiment.name} is not done: the family {name} asks {question.words}, and on none of "
                f"its set-ups are all seeds {', '.join(map(str, seeds))} of both there. Run it first: fedlora "
                f"experiment run {experiment.called} --profile {family.pilot}"
            )
        found[question.words] = there.get(question, max(alike))
    return found


def rates(experiment: Experiment, profile: str, results: Mapping[str, Result], failed: Mapping[str, str]) -> list[Rate]:
    """For each label of the searched axes: the value chosen, and the score on validation of each value and seed; where
    cells share one value, of each of them, by its label and the seed ("glora, 7")."""
    if experiment.tune is None:
        return []
    over, axis = experiment.tune.over, experiment.merged or experiment.rows[0]
    scored: list[tuple[dict[str, str], PlannedRun, float]] = []  # (labels of the axes, run of the search, score)
    for run in searches(experiment, profile):
        labels: Mapping[str, Mapping[str, Any]] = run.mergers or {run.cell.get(axis, ""): {}}
        found = results.get(run.digest)
        for label, merger in labels.items():
            result = found.merged(label, merger) if found is not None and run.mergers else found
            scored.append(({**run.cell, axis: label}, run, math.nan if result is None else result.validation_best))
    shared = [a for a in experiment.axes if a not in over and len({at[a] for at, _, _ in scored}) > 1]
    evidence: dict[tuple[str, ...], dict[str, dict[str, float | None]]] = {}
    for at, run, score in scored:
        by_run = evidence.setdefault(tuple(at[a] for a in over), {}).setdefault(f"{run.tuned:g}", {})
        by_run[", ".join([*(at[a] for a in shared), str(run.seed)])] = None if math.isnan(score) else round(score, 6)
    chosen: dict[tuple[str, ...], Rate] = {}
    for cell in experiment.cells(profile):
        value = chosen_value(experiment, profile, cell, results, failed)
        key = tuple(cell[axis] for axis in over)
        if key not in chosen:
            edge = at_the_edge(experiment, profile, value)
            told = ", ".join(key) or "all"
            chosen[key] = Rate(
                of=told, key=experiment.tune.key, value=value, at_the_edge=edge, validation=evidence.get(key, {})
            )
    return list(chosen.values())


def write_plan(path: Path, plan: SeedPlan, *, again: bool) -> SeedPlan:
    """Returns what is stored. Raises `ConfigError` where there is one already, unless `again`, which says so in the new
    one."""
    if exists(path):
        old = read_plan(path)
        if not again:
            raise ConfigError(
                f"{path} is there already, of {old.written}: {len(old.seeds)} seeds. A plan is written once, before "
                f"its runs. --again writes another one, which says that this one was there."
            )
        plan = plan.model_copy(update={"before": {**old.before, old.written: len(old.seeds)}})
    files.write(path, json.dumps(plan.model_dump(mode="json"), indent=1, sort_keys=True) + "\n")
    return plan


def read_plan(path: Path) -> SeedPlan:
    """Raises `ConfigError` for none, or for a file that is no plan."""
    try:
        return SeedPlan.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no plan {path}. Run the search and the pilot, then: fedlora experiment plan {path.stem}"
        ) from error
    except (OSError, ValidationError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"the plan {path} cannot be read: {why:.300}. Restore it (git).") from error


def check_plan(plan: SeedPlan, claims: Claims, experiment: str, runs: Mapping[str, str]) -> None:
    """Raises `ConfigError` where the questions or the runs are others than those that were planned. runs: as `runs_of`
    gives them now."""
    if plan.asked != asked(claims, experiment):
        raise ConfigError(
            f"the questions of {experiment} are not those of its plan of {plan.written}: pairs, set-ups, margins, "
            f"error rates or the gate have changed since. Put them back, or plan again (fedlora experiment plan "
            f"{experiment} --again), which the plan will show."
        )
    changed = [name for name, digest in plan.runs.items() if runs.get(name) != digest]
    if changed:
        raise ConfigError(
            f"the runs of {changed[0]} are not those of the plan of {experiment}, of {plan.written}: a label, a "
            f"set-up, a seed, a rate or the base of its file stands for something else now. Put it back, or plan again "
            f"(fedlora experiment plan {experiment} --again), which the plan will show."
        )


# ---- plans that wait -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Waiting:
    """A plan whose runs are not all there. digests: of those that are. there: seeds on which all of them are."""

    plan: SeedPlan
    digests: frozenset[str]
    there: int

    @property
    def words(self) -> str:
        return f"{self.there} of {len(self.plan.seeds)} planned seeds of {self.plan.experiment} are there"


def open_plans(
    results: Path, experiments: Iterable[Experiment], done: Mapping[str, Result], failed: Collection[str] = ()
) -> list[Waiting]:
    """Plans among the results of these experiments that wait for runs. Nobody shows a number of such runs, whatever
    experiment or profile they are asked under. What a gate takes from another experiment, the head alone, is no number
    that is compared, and is not guarded."""
    found = []
    for experiment in experiments:
        path = path_of(results, experiment.name)
        if exists(path) and (waiting := _waiting(read_plan(path), experiment, done, failed)) is not None:
            found.append(waiting)
    return found


def awaited(found: Iterable[Waiting], digests: Collection[str]) -> list[Waiting]:
    """Those of the open plans that wait for one of these runs."""
    return [one for one in found if not one.digests.isdisjoint(digests)]


def _waiting(
    plan: SeedPlan, experiment: Experiment, done: Mapping[str, Result], failed: Collection[str]
) -> Waiting | None:
    runs = [run for run in mains(experiment, plan.profile, done, failed) if run.seed in plan.seeds]
    cells = sum(1 for _ in experiment.cells(plan.profile))
    by_seed = {seed: [run for run in runs if run.seed == seed] for seed in plan.seeds}
    there = sum(
        len(of) == cells and all(run.digest in failed or run.result(done) is not None for run in of)
        for of in by_seed.values()
    )
    if there == len(plan.seeds):
        return None
    return Waiting(plan, frozenset(run.digest for run in runs if run.digest in done), there)
