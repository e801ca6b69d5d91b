"""What is missing from an experiment's tables, and why: failed runs, runs to do, and searches without a choice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedlora.experiments.digits import shown
from fedlora.experiments.grid import Grid
from fedlora.experiments.plan import PlannedRun
from fedlora.experiments.spec import Cell

_NAMED = 5  # the most missing cells to name


@dataclass(frozen=True)
class Lost:
    """Runs of one cell without a result, for one reason.

    seeds: which. why: the failure; "" if they were not run. by_machine: the failure says nothing about the runs.
    value: for runs that a search waits for, such as "train.lr = 0.01"; None for runs that count.
    """

    cell: Cell
    seeds: tuple[int, ...]
    why: str
    by_machine: bool = False
    value: str | None = None

    @property
    def words(self) -> str:
        label, on = ", ".join(self.cell.values()), _on(self.seeds)
        if self.value is not None and self.why:
            return (
                f"{label}: the search waits for {self.value}, which this machine failed to run on {on}: "
                f"{self.why.rstrip('.')}. Mend that, then continue."
            )
        if self.value is not None:
            return f"{label}: the search waits for {self.value} on {on}"
        return f"{label} failed on {on}: {self.why}" if self.why else f"{label} on {on}"


def lost_of(grid: Grid) -> list[Lost]:
    """Every run that counts but has no result; for a search that cannot choose yet, the runs that it waits for."""
    found: dict[tuple[tuple[tuple[str, str], ...], str | None, str, bool], list[int]] = {}

    def add(run: PlannedRun, value: str | None) -> None:
        why = grid.failed.get(run.digest, "") or grid.by_machine.get(run.digest, "")
        key = (tuple(run.cell.items()), value, why, run.digest not in grid.failed)
        found.setdefault(key, []).append(run.seed)

    for run in grid.runs:
        if run.digest not in grid.results:
            add(run, None)
    chosen = {tuple(run.cell.items()) for run in grid.runs}
    if any(tuple(cell.items()) not in chosen for cell in grid.cells):
        for run in grid.searches:
            if run.digest not in grid.failed and run.digest not in grid.results:
                add(run, value_in_words(grid, run))
    return [
        Lost(dict(cell), tuple(sorted(seeds)), why, by_machine, value)
        for (cell, value, why, by_machine), seeds in found.items()
    ]


def dead_ends(grid: Grid) -> dict[str, str]:
    """Cell, in words -> why its search is done but chose nothing."""
    whys = {", ".join(cell.values()): grid.choice(cell).why for cell in grid.cells}
    return {cell: why for cell, why in whys.items() if why is not None}


def worst_values(grid: Grid) -> list[str]:
    """A line for each value that counts as the worst of its search, because a run failed or has no validation score."""
    seeds: dict[tuple[str, str, str], list[int]] = {}
    for run in grid.searches:
        found = grid.results.get(run.digest)
        if found is None and run.digest not in grid.failed:
            continue
        if found is not None and not math.isnan(found.validation_best):
            continue
        why = grid.failed[run.digest] if found is None else ""
        seeds.setdefault((", ".join(run.cell.values()), value_in_words(grid, run), why), []).append(run.seed)
    return [
        f"{cell}: {value} is dropped from the search, for it failed on {_on(on)}: {why}"
        if why
        else f"{cell}: {value} counts as the worst of the search: on {_on(on)} it diverged, and has no score on "
        f"validation."
        for (cell, value, why), on in seeds.items()
    ]


def lost_lines(grid: Grid) -> list[str]:
    """All of the above in words, how many of the planned runs have a result, and what the file leaves out and why."""
    lost = lost_of(grid)
    lines = [one.words for one in lost if one.why]
    lines += [f"{cell} not run: {why}" for cell, why in dead_ends(grid).items()]
    if not is_whole(grid):
        idle = [one.words for one in lost if not one.why]
        more = [f"{len(idle) - _NAMED} more"] if len(idle) > _NAMED else []
        waiting = f" Not run: {'; '.join([*idle[:_NAMED], *more])}." if idle else ""
        lines.append(f"Incomplete: {len(grid.used)} of {grid.count} planned runs have a result.{waiting}")
    return [*worst_values(grid), *lines, *grid.experiment.left_out(grid.profile)]


def is_whole(grid: Grid) -> bool:
    """Whether every planned run has a result."""
    return len(grid.used) == grid.count


def value_in_words(grid: Grid, run: PlannedRun) -> str:
    """The value of a search's run: "train.lr = 0.01"."""
    tune = grid.experiment.tune
    return f"{tune.key} = {shown(run.tuned)}" if tune is not None and run.tuned is not None else ""


def _on(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, sorted(seeds)))}"
