"""Which runs an open plan waits for: nobody shows a number of them before all planned seeds are there, or it is noted.

Runs are known by their digests, whatever experiment or profile they are shown in. A plan is open until it was answered
or all its runs are there. What a gate takes from another experiment, the head alone, is no number that is compared, and
is not guarded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fedlora.errors import ConfigError
from fedlora.experiments.deciding.seed_plan import Plan, answered, note_look, path_of, read_plan
from fedlora.experiments.grid.plan import mains
from fedlora.experiments.grid.spec import Experiment
from fedlora.experiments.stored.results import Result


@dataclass(frozen=True)
class Waiting:
    """An open plan. digests: of its runs that have a result. there: seeds on which all of its runs are finished."""

    path: Path
    plan: Plan
    digests: frozenset[str]
    there: int

    @property
    def words(self) -> str:
        return f"{self.there} of {len(self.plan['seeds'])} planned seeds of {self.path.stem} are there"


def open_plans(
    results: Path, experiments: Iterable[Experiment], done: Mapping[str, Result], failed: Collection[str] = ()
) -> list[Waiting]:
    """Every plan beside the results that is open.

    Raises:
        ConfigError: a damaged plan, or an open one whose experiment or profile is not among `experiments`: which runs
            it waits for nobody could say.
    """
    by_name, found = {experiment.name: experiment for experiment in experiments}, []
    for path in sorted(path_of(results, "x").parent.glob("*.json")):
        plan = read_plan(path)
        if answered(plan) is not None:
            continue
        if path.stem not in by_name or plan["profile"] not in by_name[path.stem].profiles:
            raise ConfigError(
                f"the plan {path} waits for runs of {path.stem}, profile {plan['profile']}, and there is no such "
                f"experiment or profile: which numbers may be shown is not known. Put its file back (--experiments), "
                f"or move the plan away."
            )
        waiting = _waiting(path, plan, by_name[path.stem], done, failed)
        if waiting.there < len(plan["seeds"]):
            found.append(waiting)
    return found


def awaited(found: Iterable[Waiting], digests: Collection[str]) -> list[Waiting]:
    """Those of the open plans that wait for one of these runs."""
    return [one for one in found if not one.digests.isdisjoint(digests)]


def note_early(found: Iterable[Waiting], digests: Collection[str], by: str) -> list[str]:
    """A look at these runs, noted in each plan that waits for one of them; a line for each."""
    lines = []
    for one in awaited(found, digests):
        note_look(one.path, one.plan, [one.there], by=by)
        lines.append(
            f"A look before its time, noted in {one.path}: {len(one.plan['seeds'])} seeds are planned, {one.there} of "
            f"each are there."
        )
    return lines


def _waiting(
    path: Path, plan: Plan, experiment: Experiment, done: Mapping[str, Result], failed: Collection[str]
) -> Waiting:
    runs = [run for run in mains(experiment, plan["profile"], done, failed) if run.seed in plan["seeds"]]
    cells = sum(1 for _ in experiment.cells(plan["profile"]))
    there = 0
    for seed in plan["seeds"]:
        of = [run for run in runs if run.seed == seed]
        there += len(of) == cells and all(run.digest in failed or run.result(done) is not None for run in of)
    return Waiting(path, plan, frozenset(run.digest for run in runs if run.digest in done), there)
