"""An experiment's plan, in a file: how many seeds, why, and at which rates.

    results/plans/NAME.json    written once by `fedlora experiment plan`, after the search and the pilot

Nothing is decided without it, or before its number of seeds has run. A plan that is written again says so beside every
verdict; the previous plan is in the repository's history.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from fedlora.core import files
from fedlora.errors import ConfigError
from fedlora.experiments.claims import Claims, Family, Question
from fedlora.experiments.decisions import Scores, gaps_of
from fedlora.experiments.grid import Grid
from fedlora.experiments.plan import PlannedRun
from fedlora.experiments.result import Commit, Part, Result, content
from fedlora.experiments.spec import Experiment
from fedlora.experiments.verdicts import seeds_needed, weigh
from fedlora.runs.inputs import named


class Rate(Part):
    """The search's choice for the cells `of`, and the score on validation of each value and run tried."""

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
    """A plan's file. asked: a digest of the questions. defined: of each cell (`definitions`). needed: family -> the
    seeds that it takes. spreads: family -> question -> standard deviation of its gaps in the pilot. results: those that
    existed already. before: when earlier plans were written, and how many seeds they had."""

    experiment: str
    asked: str
    defined: dict[str, str]
    written: str
    commit: Commit | None
    profile: str
    seeds: list[int]
    needed: dict[str, int]
    spreads: dict[str, dict[str, float]]
    rates: list[Rate]
    results: Before = Before(there=0, of=0)
    before: dict[str, int] = Field(default_factory=dict)

    @property
    def history(self) -> list[str]:
        """What a reader of verdicts must know about their history. Empty for one plan before its runs."""
        count = len(self.before) + 1
        said = [
            f"Plan {k} of {count}, of {written}, had {seeds} seeds. The present plan came after it: if its "
            f"runs were seen, no error rate holds."
            for k, (written, seeds) in enumerate(self.before.items(), start=1)
        ]
        if self.results.there:
            said.append(
                f"{self.results.there} of the {self.results.of} planned runs existed when the plan was written. If "
                f"it followed from them, no error rate holds."
            )
        return said


def path_of(results: Path, experiment: str) -> Path:
    """A plan's path, among the results."""
    return results / "plans" / f"{experiment}.json"


def asked(claims: Claims, experiment: str) -> str:
    """A digest of everything that decides verdicts: pairs, set-ups, margins, scores, error rates and the gate."""
    families = {
        name: family.model_dump(mode="json", exclude={"question", "claims"})
        for name, family in claims.of(experiment).items()
    }
    gate = claims.gates.get(experiment)
    told = [families, claims.alpha, claims.power, gate.model_dump(mode="json") if gate else None]
    return content(told)


def definitions(experiment: Experiment, profile: str) -> dict[str, str]:
    """Cell, in words -> a digest of its runs, whatever their seed: the configuration, by the names of its files, and a
    merger's settings."""
    grid = Grid(experiment.with_seeds(profile, [0]), profile)
    runs = [grid.first(cell) for cell in grid.cells]
    return {", ".join(run.cell.values()): content([named(run.config).digest(), run.mergers]) for run in runs}


def make_plan(
    claims: Claims, grid: Grid, pilot: Scores, commit: Any, seen: Mapping[str, Result] | None = None
) -> SeedPlan:
    """The plan: seeds from the pilot's spreads, the rates with the scores that decided them, and how many of its runs
    exist already.

    Args:
        grid: at the profile that answers the families' questions. pilot: from `read_scores`, at the pilot's profile.
        seen: all existing results, including those of a changed checkout.

    A question whose set-up has no pilot takes the largest spread of its pair.

    Raises:
        ConfigError: a pair lacks a pilot, or the search is not done.
    """
    experiment = grid.experiment
    families = claims.of(experiment.name)
    spreads = {name: spreads_of(name, family, experiment, pilot) for name, family in families.items()}
    needed = {  # to find equal methods equivalent at the largest spread
        name: seeds_needed(
            max(spreads[name].values()), family.margin, len(family.questions), alpha=claims.alpha, power=claims.power
        )
        for name, family in families.items()
    }
    known = grid.seeds
    seeds = known[: max(max(4, min(family.cap, needed[name])) for name, family in families.items())]
    planned = grid.of_seeds(seeds).runs
    cells = len(grid.cells)
    if len(planned) < cells * len(seeds):
        raise ConfigError(
            f"the search of {experiment.name}, profile {grid.profile}, is not done: {len(planned) // len(seeds)} of "
            f"{cells} cells have a value. A plan says which runs answer, so run the search first: fedlora experiment "
            f"run {experiment.called} --profile {grid.profile} --seeds {known[0]}"
        )
    there = sum(run.result(grid.results if seen is None else seen) is not None for run in planned)
    return SeedPlan(
        experiment=experiment.name, asked=asked(claims, experiment.name), commit=commit,
        defined=definitions(experiment, grid.profile),
        written=datetime.now(UTC).isoformat(timespec="seconds"), profile=grid.profile, seeds=seeds, needed=needed,
        spreads=spreads, rates=rates(grid), results=Before(there=there, of=len(planned)),
    )  # fmt: skip


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
                f"the pilot of {experiment.name} is not done: the family {name} asks {question.words}, but no "
                f"set-up has all seeds {', '.join(map(str, seeds))} of both. Run it first: fedlora "
                f"experiment run {experiment.called} --profile {family.pilot}"
            )
        found[question.words] = there.get(question, max(alike))
    return found


def rates(grid: Grid) -> list[Rate]:
    """For each label of the searched axes: the chosen value, and the score on validation of each value and seed; if
    cells share one value, for each of them, by its label and the seed ("glora, 7")."""
    experiment = grid.experiment
    if experiment.tune is None:
        return []
    over, axis = experiment.tune.over, experiment.merged or grid.rows
    scored: list[tuple[dict[str, str], PlannedRun, float]] = []  # (labels of the axes, run of the search, score)
    for run in grid.searches:
        labels: Mapping[str, Mapping[str, Any]] = run.mergers or {run.cell.get(axis, ""): {}}
        found = grid.results.get(run.digest)
        for label, merger in labels.items():
            result = found.merged(label, merger) if found is not None and run.mergers else found
            scored.append(({**run.cell, axis: label}, run, math.nan if result is None else result.validation_best))
    shared = [a for a in experiment.axes if a not in over and len({at[a] for at, _, _ in scored}) > 1]
    evidence: dict[tuple[str, ...], dict[str, dict[str, float | None]]] = {}
    for at, run, score in scored:
        by_run = evidence.setdefault(tuple(at[a] for a in over), {}).setdefault(f"{run.tuned:g}", {})
        by_run[", ".join([*(at[a] for a in shared), str(run.seed)])] = None if math.isnan(score) else round(score, 6)
    chosen: dict[tuple[str, ...], Rate] = {}
    for cell in grid.cells:
        key = tuple(cell[axis] for axis in over)
        if key not in chosen:
            made = grid.choice(cell)
            chosen[key] = Rate(
                of=", ".join(key) or "all", key=experiment.tune.key, value=made.value, validation=evidence.get(key, {}),
                at_the_edge=made.edge,
            )  # fmt: skip
    return list(chosen.values())


def write_plan(path: Path, plan: SeedPlan, *, again: bool) -> SeedPlan:
    """Store a plan, and return what is stored. Raises `ConfigError` if there is one already, unless `again`; the new
    one then says so."""
    if os.path.lexists(path):
        old = read_plan(path)
        if not again:
            raise ConfigError(
                f"{path} exists already, of {old.written}, with {len(old.seeds)} seeds. A plan is written once, before "
                f"its runs. --again writes another one, which mentions this one."
            )
        plan = plan.model_copy(update={"before": {**old.before, old.written: len(old.seeds)}})
    files.write(path, json.dumps(plan.model_dump(mode="json"), indent=1, sort_keys=True) + "\n")
    return plan


def read_plan(path: Path) -> SeedPlan:
    """A plan. Raises `ConfigError` if there is none, or the file is not a plan."""
    try:
        return SeedPlan.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no plan {path}. Run the search and the pilot, then: fedlora experiment plan {path.stem}"
        ) from error
    except (OSError, ValidationError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"the plan {path} cannot be read: {why:.300}. Restore it (git).") from error


def plan_there(results: Path, experiment: str) -> SeedPlan | None:
    """The plan among the results; None if there is none, not even a damaged one. Raises as `read_plan` does."""
    path = path_of(results, experiment)
    return read_plan(path) if os.path.lexists(path) else None


def check_plan(plan: SeedPlan, claims: Claims, experiment: Experiment) -> None:
    """Raises `ConfigError` if the questions differ from the planned ones, or a label has got another meaning."""
    now = definitions(experiment, plan.profile)
    changed = [cell for cell, digest in plan.defined.items() if now.get(cell, digest) != digest]
    what = (
        "pairs, set-ups, margins, error rates or the gate have" if plan.asked != asked(claims, experiment.name) else ""
    )
    if changed:
        more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
        what = f"the runs of {'; '.join(changed[:5])}{more} are defined differently: [run], an axis or the profile has"
    if what:
        raise ConfigError(
            f"the questions of {experiment.name} differ from its plan of {plan.written}: {what} changed since. Undo "
            f"that, or plan again (fedlora experiment plan {experiment.called} --again); the plan will show it."
        )
