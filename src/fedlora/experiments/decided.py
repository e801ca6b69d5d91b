"""What is decided of an experiment with a plan, and what waits: no number before all planned seeds are there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedlora.experiments.claims import Claims
from fedlora.experiments.decisions import Answers, answers_from
from fedlora.experiments.grid import Grid
from fedlora.experiments.seed_plan import SeedPlan, check_plan, path_of, plan_there, read_plan
from fedlora.experiments.spec import Experiment


@dataclass(frozen=True)
class Decided:
    """grid: at the plan's profile and seeds. answers: of each family that asks about the experiment."""

    claims: Claims
    plan: SeedPlan
    grid: Grid
    answers: Sequence[Answers] = ()

    @property
    def late(self) -> str:
        """ "2 of 4 planned seeds of small are there", while an answer waits for them (maybe for the head alone, in
        another experiment); otherwise ""."""
        waiting = [one for one in self.answers if not one.complete]
        return _late(waiting[0].there, waiting[0].wanted, self.grid) if waiting else ""


def decided(claims: Claims, results: Path, grid: Grid, find: Callable[[str], Experiment]) -> Decided:
    """The answers by the experiment's plan, among the results. find: an experiment by its name, for a gate.

    Raises:
        ConfigError: there is no plan, or questions or labels differ from it.
    """
    plan = read_plan(path_of(results, grid.experiment.name))
    check_plan(plan, claims, grid.experiment)
    whole = replace(grid, profile=plan.profile)
    return Decided(claims, plan, whole.of_seeds(plan.seeds), answers_from(claims, whole, find, plan.seeds))


def still_open(results: Path, grid: Grid) -> str:
    """The same of a profile whose plan waits for runs, whatever it asks. A number from these runs would be a look
    before its time."""
    plan = plan_there(results, grid.experiment.name)
    if plan is None or plan.profile != grid.profile:
        return ""
    planned = grid.of_seeds(plan.seeds)
    ended = Counter(r.seed for r in planned.runs if r.digest in grid.failed or r.result(grid.results) is not None)
    there = sum(count == len(grid.cells) for count in ended.values())
    return "" if there == len(plan.seeds) else _late(there, len(plan.seeds), grid)


def _late(there: int, wanted: int, grid: Grid) -> str:
    return f"{there} of {wanted} planned seeds of {grid.experiment.name} are there"
