"""What results say: means and spreads of an experiment's cells, and paired differences between two of its labels."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from fedlora.experiments.grid.plan import chosen_value, mains
from fedlora.experiments.grid.spec import Cell, Experiment
from fedlora.experiments.scores.digits import ALIKE, alike, places
from fedlora.experiments.scores.numbers import parse_number
from fedlora.experiments.stored.results import Result


@dataclass(frozen=True)
class CellScore:
    """One cell. scores: seed -> value, of the seeds that were run. planned: how many were meant. tuned: the value that
    the search chose. metric: what the scores are of, as "accuracy"; None where nothing was run."""

    cell: Cell
    scores: Mapping[int, float]
    planned: int
    tuned: float | None
    metric: str | None = None

    @property
    def mean(self) -> float | None:
        return fmean(self.scores.values()) if self.scores else None

    @property
    def spread(self) -> float | None:
        """The standard deviation over seeds."""
        return stdev(self.scores.values()) if len(self.scores) > 1 else None


@dataclass(frozen=True)
class Difference:
    """other - reference over the seeds that both have: mean, 95 % confidence interval and two-sided p (paired t)."""

    reference: str
    other: str
    where: Mapping[str, str]
    pairs: int
    mean: float
    low: float
    high: float
    p: float

    @property
    def decided(self) -> bool:
        """Whether the interval leaves out zero. Gaps that are all alike have no interval, and decide nothing."""
        return self.low != self.high and (self.low > 0 or self.high < 0)

    @property
    def interval(self) -> tuple[float, float] | None:
        """None where all gaps are alike."""
        return None if self.low == self.high else (self.low, self.high)

    @property
    def verdict(self) -> str:
        """ "undecided" where the interval holds zero; where all gaps are alike there is none, and where they are all
        zero the scores are "equal"."""
        if self.low == self.high:
            return "no spread" if self.mean else "equal"
        return "" if self.decided else "undecided"


@dataclass(frozen=True)
class Placing:
    """Which places a label took among the others. counts: of the first place, the second, ..., over the seeds that all
    have. Labels whose scores are alike (`digits.alike`) share the better place."""

    label: str
    counts: tuple[int, ...]

    @property
    def mean(self) -> float:
        return sum(place * count for place, count in enumerate(self.counts, start=1)) / sum(self.counts)


def score_cells(
    experiment: Experiment,
    profile: str,
    results: Mapping[str, Result],
    which: str | None = None,
    failed: Collection[str] = (),
) -> list[CellScore]:
    """Every cell of the profile with what has been run of it. which: a name as `Result.score` takes it. failed: as
    `plan.chosen_value` takes it."""
    which = which or experiment.profile(profile).metric or experiment.metric
    done: dict[tuple[str, ...], dict[int, float]] = {}
    metrics: dict[tuple[str, ...], str] = {}
    for run in mains(experiment, profile, results, failed):
        if (result := run.result(results)) is not None:
            metrics[tuple(run.cell.values())] = result.metric
            value = result.score(which)
            if value is not None:
                done.setdefault(tuple(run.cell.values()), {})[run.seed] = value
    planned = len(experiment.profile(profile).seeds)
    return [
        CellScore(
            cell, done.get(tuple(cell.values()), {}), planned,
            chosen_value(experiment, profile, cell, results, failed), metrics.get(tuple(cell.values())),
        )
        for cell in experiment.cells(profile)
    ]  # fmt: skip


def measured_by(cells: Sequence[CellScore]) -> str | None:
    """The metric of the cells' scores, or all of them; None where nothing was run."""
    return " and ".join(dict.fromkeys(cell.metric for cell in cells if cell.metric is not None)) or None


def score_categories(
    experiment: Experiment, profile: str, results: Mapping[str, Result], which: str, failed: Collection[str] = ()
) -> dict[str, dict[str, float]]:
    """Label of the first row axis -> category -> mean over its tasks and over seeds, for data that come in tasks.

    which: "test, last" (tasks that clients train on), "unseen, last" and so on.
    """
    axis = experiment.rows[0]
    found: dict[str, dict[str, list[float]]] = {}
    for run in mains(experiment, profile, results, failed):
        result = run.result(results)
        for task, score in (result.by_group(which) if result else {}).items():
            category = result.raw["categories"].get(task, task) if result else task
            found.setdefault(run.cell[axis], {}).setdefault(category, []).append(score)
    return {label: {c: fmean(x) for c, x in sorted(by.items())} for label, by in found.items()}


def placings(cells: Sequence[CellScore], axis: str, *, smaller_is_better: bool = False) -> list[Placing]:
    """The places of the axis's labels, seed by seed; cells differ in that axis only. None where no seed is in all."""
    seeds = set.intersection(*(set(cell.scores) for cell in cells)) if cells else set()
    if not seeds:
        return []
    counts = [[0] * len(cells) for _ in cells]
    for seed in seeds:
        for k, place in enumerate(places([cell.scores[seed] for cell in cells], smaller_is_better=smaller_is_better)):
            counts[k][place] += 1
    return [Placing(cell.cell[axis], tuple(count)) for cell, count in zip(cells, counts, strict=True)]


def orders(cells: Sequence[CellScore], *, smaller_is_better: bool = False) -> tuple[int, int]:
    """How many different orders of the cells there are over the seeds that all have, and how many seeds these are.
    An order in which two share a place is another one than those in which one of them is ahead."""
    seeds = set.intersection(*(set(cell.scores) for cell in cells)) if cells else set()
    found = {places([cell.scores[seed] for cell in cells], smaller_is_better=smaller_is_better) for seed in seeds}
    return len(found), len(seeds)


def smaller_is_better(which: str, metric: str) -> bool:
    """Whether of a number, as `Result.score` takes its name, less is better."""
    return parse_number(which).smaller_is_better(metric)


def paired(cells: Sequence[CellScore], axis: str, reference: str) -> list[Difference]:
    """Each other label of the axis against the reference, where all other axes agree, over the seeds that both have."""
    differences = []
    for theirs in cells:
        if theirs.cell[axis] == reference:
            continue
        where = {name: label for name, label in theirs.cell.items() if name != axis}
        for ours in cells:
            if ours.cell[axis] == reference and all(ours.cell[name] == label for name, label in where.items()):
                seeds = sorted(set(ours.scores) & set(theirs.scores))
                if len(seeds) > 1:
                    pairs = [(theirs.scores[seed], ours.scores[seed]) for seed in seeds]
                    differences.append(difference(reference, theirs.cell[axis], where, pairs))
    return differences


def difference(
    reference: str, other: str, where: Mapping[str, str], pairs: Sequence[tuple[float, float]]
) -> Difference:
    """The paired t interval of (other, reference) pairs. What differs by rounding alone (`digits.alike`) is no gap."""
    from scipy import stats

    gaps = [0.0 if alike(a, b) else a - b for a, b in pairs]
    rounding = ALIKE * max(abs(score) for pair in pairs for score in pair)
    if max(gaps) - min(gaps) <= rounding:  # no spread: the interval is the number itself
        mean = fmean(gaps)
        return Difference(reference, other, where, len(gaps), mean, mean, mean, math.nan)
    test = stats.ttest_1samp(gaps, 0.0)
    interval = test.confidence_interval(0.95)
    return Difference(
        reference, other, where, len(gaps), fmean(gaps), float(interval.low), float(interval.high), float(test.pvalue)
    )
