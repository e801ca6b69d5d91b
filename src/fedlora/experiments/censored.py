"""Rounds to a target, with runs that never got there: censored at their last round, and not left out.

Kaplan and Meier's estimate (scipy) of the share of runs that are still below the target after each round. A run that
reaches no target would otherwise drop out of the mean, which then favours methods that fail.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedlora.experiments.grid import Grid
from fedlora.experiments.spec import Cell


@dataclass(frozen=True)
class Reaching:
    """One cell. reached: seed -> the first evaluated round at the target. censored: seed -> the last round of a run
    that did not get there; of one that diverged or failed, the last round that was planned."""

    cell: Cell
    reached: dict[int, int]
    censored: dict[int, int]

    @property
    def runs(self) -> int:
        return len(self.reached) + len(self.censored)

    @property
    def end(self) -> int:
        """The last round that any of its runs was watched in."""
        return max([*self.reached.values(), *self.censored.values()])

    @cached_property
    def below(self) -> Any:
        """scipy's estimate: quantiles (rounds), probabilities (the share of runs below the target after each)."""
        from scipy import stats

        return stats.ecdf(self._sample()).sf

    @property
    def median(self) -> int | None:
        """The round after which at most half of the runs are below the target; None if more stay below to the end."""
        pairs = zip(self.below.quantiles, self.below.probabilities, strict=True)
        return next((round(t) for t, share in pairs if share <= 0.5), None)

    def against(self, other: Reaching) -> float | None:
        """The two-sided p of the log-rank test against another cell; None if no run of either gets there, if all get
        there in one round, or if there are fewer than two runs of one."""
        rounds = {*self.reached.values(), *other.reached.values()}
        alike = len(rounds) == 1 and not (self.censored or other.censored)
        if not rounds or alike or min(self.runs, other.runs) < 2:
            return None
        from scipy import stats

        return float(stats.logrank(self._sample(), other._sample()).pvalue)

    def _sample(self) -> Any:
        from scipy import stats

        return stats.CensoredData([*self.reached.values()], right=[*self.censored.values()])


def compared(grid: Grid, target: float) -> list[tuple[Reaching, float | None]]:
    """`reaching`, each with its p against the reference at the same place; None if there is no other to compare."""
    found = reaching(grid, target)
    by_cell = {tuple(one.cell.items()): one for one in found}
    reference = grid.experiment.reference or ""
    theirs = [by_cell.get(tuple({**one.cell, grid.rows: reference}.items())) for one in found]
    return [
        (one, None if other is None or other is one else one.against(other))
        for one, other in zip(found, theirs, strict=True)
    ]


def reaching(grid: Grid, target: float) -> list[Reaching]:
    """Every cell with a finished or failed run, in the file's order. target: of `evaluate.metric` on validation."""
    found: dict[tuple[str, ...], Reaching] = {}
    for run in grid.runs:
        mine = found.setdefault(tuple(run.cell.values()), Reaching(run.cell, {}, {}))
        result, planned = grid.results.get(run.digest), run.config.run.rounds
        if result is None and run.digest not in grid.failed:
            continue
        there = None if result is None else result.rounds_to(target)
        diverged = result is None or any(value != value for value in result.history.curve(result.metric).values())
        if there is not None:
            mine.reached[run.seed] = there
        else:
            mine.censored[run.seed] = planned if diverged or result is None else result.rounds
    return [one for one in found.values() if one.runs]
