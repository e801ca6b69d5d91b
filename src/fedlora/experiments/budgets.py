"""The cost of privacy: each cell's spent epsilon, with its scores on the test set after the last round."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from fedlora.errors import ConfigError
from fedlora.experiments.grid import Grid
from fedlora.experiments.result import SCORES, Result, Spent

SIMULATIONS = "Private runs of an experiment are simulations, each with a population and an epsilon of its own."


@dataclass(frozen=True)
class Budget:
    """One cell over its seeds. line, label: of the two axes. scores: score -> seed -> value, on the test set after the
    last round; without a score that some run lacks because it diverged. spent: by each of its runs, read from the
    results and not from the plan; None if the cell has no [privacy]."""

    line: str
    label: str
    seeds: int
    scores: Mapping[str, Mapping[int, float]]
    spent: Spent | None = None

    @property
    def epsilon(self) -> float | None:
        return None if self.spent is None else self.spent.epsilon_planned

    def mean(self, score: str) -> float:
        return fmean(self.scores[score].values())

    def spread(self, score: str) -> tuple[float, float]:
        """(least, largest) over the seeds."""
        return min(self.scores[score].values()), max(self.scores[score].values())


def spendings(grid: Grid) -> list[Budget]:
    """Every cell with a result, in the file's order; empty for an experiment without `budgets`.

    Raises:
        ConfigError: the runs of one cell spent different amounts, or have [privacy] where the file excludes it.
    """
    axes = grid.experiment.budgets
    if axes is None:
        return []
    found: dict[tuple[str, str], dict[int, Result]] = {}
    for run, result in grid.used:
        found.setdefault((run.cell[axes.lines], run.cell[axes.axis]), {})[run.seed] = result
    return [_spent(line, label, label != axes.none, by_seed) for (line, label), by_seed in found.items()]


def _spent(line: str, label: str, private: bool, by_seed: Mapping[int, Result]) -> Budget:
    tested = {score: {seed: result.tested(score) for seed, result in by_seed.items()} for score in SCORES}
    scores = {score: {seed: x for seed, x in by.items() if x is not None} for score, by in tested.items()}
    scores = {score: by for score, by in scores.items() if len(by) == len(by_seed)}
    told: list[Spent] = [result.privacy for result in by_seed.values() if result.privacy is not None]
    if len(told) != (len(by_seed) if private else 0):
        raise ConfigError(
            f"{line}, {label}: {len(told)} of its {len(by_seed)} runs have [privacy], but by budgets.none "
            f"{'all' if private else 'none'} should."
        )
    if not private:
        return Budget(line, label, len(by_seed), scores)
    if any(one != told[0] for one in told):
        raise ConfigError(f"{line}, {label}: its runs spent different amounts.")
    return Budget(line, label, len(by_seed), scores, told[0])


def budget_rows(found: Sequence[Budget], lines: str) -> tuple[list[str], list[list[str]]]:
    """(columns, rows) in words: each cell's spending, and mean ± standard deviation over its seeds. lines: the axis."""
    columns = [lines, "epsilon", "delta", "z", "q", "rounds", "accuracy", "log-loss", "seeds"]
    rows = []
    for cell in found:
        spent, told = cell.spent, ["none", "", "", "", ""]
        if spent is not None:
            told = [_epsilon(cell), f"{spent.delta:g}", f"{spent.noise_multiplier:.4g}", f"{spent.sampling:g}",
                    str(spent.rounds_planned)]  # fmt: skip
        rows.append([cell.line, *told, _score(cell, "accuracy"), _score(cell, "loss"), str(cell.seeds)])
    return columns, rows


def _epsilon(cell: Budget) -> str:
    """Epsilon rounded up; a run that is clipped and hardly noised has no guarantee."""
    e = cell.epsilon or 0.0
    return f"{math.ceil(e * 100) / 100:.2f}" if e < 1000 else f"none ({cell.label})"


def _score(cell: Budget, score: str) -> str:
    values = list(cell.scores.get(score, {}).values())
    if not values:
        return "none: a run has no number"
    return f"{fmean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")
