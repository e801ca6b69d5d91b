"""What privacy costs: held-out scores by what was spent, a line for each federation, beside the run without privacy.

Every number of the mechanism (epsilon, delta, z, q, rounds) is read from the stored results, not from the plan.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from fedlora.errors import ConfigError
from fedlora.experiments.grid.plan import mains
from fedlora.experiments.grid.spec import Experiment
from fedlora.experiments.stored.results import Result
from fedlora.experiments.tables.prices import SCORES

SIMULATIONS = "Private runs of an experiment are simulations: each is a population of its own, and epsilon is its own."
_SAME = ("epsilon_planned", "delta", "noise_multiplier", "sampling", "rounds_planned", "clip")


@dataclass(frozen=True)
class Spent:
    """One cell over its seeds. line, label: of the two axes. scores: score -> seed -> value, on the test set after the
    last round; none of a score that a run lacks, because it diverged. epsilon, delta, z, q, rounds, clip: of each of
    its runs; None where the cell has no [privacy]."""

    line: str
    label: str
    seeds: int
    scores: Mapping[str, Mapping[int, float]]
    epsilon: float | None = None
    delta: float | None = None
    z: float | None = None
    q: float | None = None
    rounds: int | None = None
    clip: float | None = None

    def mean(self, score: str) -> float:
        return fmean(self.scores[score].values())

    def spread(self, score: str) -> tuple[float, float]:
        """(least, largest) over the seeds."""
        return min(self.scores[score].values()), max(self.scores[score].values())


def spendings(
    experiment: Experiment, profile: str, results: Mapping[str, Result], failed: Collection[str] = ()
) -> list[Spent]:
    """Every cell that has a result, in the order of the file; empty for an experiment without `budgets`.

    Raises:
        ConfigError: runs of one cell that did not spend the same, or that have [privacy] where the file says none.
    """
    axes = experiment.budgets
    if axes is None:
        return []
    found: dict[tuple[str, str], dict[int, Result]] = {}
    for run in mains(experiment, profile, results, failed):
        if run.digest in results:
            found.setdefault((run.cell[axes.lines], run.cell[axes.axis]), {})[run.seed] = results[run.digest]
    return [_spent(line, label, label != axes.none, by_seed) for (line, label), by_seed in found.items()]


def _spent(line: str, label: str, private: bool, by_seed: Mapping[int, Result]) -> Spent:
    scores: dict[str, dict[int, float]] = {}
    for seed, result in by_seed.items():
        for score in SCORES:
            value = result.raw["test"]["last"].get(score)
            if isinstance(value, int | float) and math.isfinite(value):
                scores.setdefault(score, {})[seed] = float(value)
    scores = {score: by for score, by in scores.items() if len(by) == len(by_seed)}
    told = [found for result in by_seed.values() if (found := result.raw.get("privacy")) is not None]
    if len(told) != (len(by_seed) if private else 0):
        raise ConfigError(
            f"{line}, {label}: {len(told)} of its {len(by_seed)} runs have [privacy], and by budgets.none "
            f"{'all have it' if private else 'none has'}."
        )
    if not private:
        return Spent(line, label, len(by_seed), scores)
    if len({tuple(one[key] for key in _SAME) for one in told}) > 1:
        raise ConfigError(f"{line}, {label}: its runs have not spent the same.")
    e, delta, z, q, rounds, clip = (told[0][key] for key in _SAME)
    return Spent(line, label, len(by_seed), scores, e, delta, z, q, rounds, clip)


def budget_rows(found: Sequence[Spent], lines: str) -> tuple[list[str], list[list[str]]]:
    """(columns, rows) in words: what each cell spent, and mean ± standard deviation over its seeds. lines: the axis."""
    columns = [lines, "epsilon", "delta", "z", "q", "rounds", "accuracy", "log-loss", "seeds"]
    rows = []
    for cell in found:
        spent = ["none", "", "", ""]
        if cell.epsilon is not None and cell.delta is not None:
            spent = [_epsilon(cell), f"{cell.delta:g}", f"{cell.z:.4g}", f"{cell.q:g}"]
        rounds = "" if cell.rounds is None else str(cell.rounds)
        rows.append([cell.line, *spent, rounds, _score(cell, "accuracy"), _score(cell, "loss"), str(cell.seeds)])
    return columns, rows


def _epsilon(cell: Spent) -> str:
    """Rounded up; of a run that is clipped and hardly noised no promise at all."""
    e = cell.epsilon or 0.0
    return f"{math.ceil(e * 100) / 100:.2f}" if e < 1000 else f"none ({cell.label})"


def _score(cell: Spent, score: str) -> str:
    values = list(cell.scores.get(score, {}).values())
    if not values:
        return "none: a run has no number"
    return f"{fmean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")
