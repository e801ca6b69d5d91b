"""Scores of cells over their seeds, their differences paired by seed, and the places that labels take."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from fedlora.experiments.digits import ALIKE, alike, in_words, places
from fedlora.experiments.grid import Grid
from fedlora.experiments.result import Result
from fedlora.experiments.scores import explained, parse_number
from fedlora.experiments.spec import Cell

OWN_DATA = ", of each client's own model on its own data"


@dataclass(frozen=True)
class CellScore:
    """One cell. scores: seed -> value, for finished seeds. planned: the number of planned seeds. tuned: the value that
    the search chose. metric: of the scores, such as "accuracy"; None if nothing was run. none: seeds whose run has no
    number: it diverged, failed on its own, or never got there (rounds to a target). less: whether less is
    better. unit: the number in words; only cells with the same unit are compared."""

    cell: Cell
    scores: Mapping[int, float]
    planned: int
    tuned: float | None
    metric: str | None = None
    none: tuple[int, ...] = ()
    less: bool = False
    unit: str | None = None

    @property
    def mean(self) -> float | None:
        """The mean; None if a run has no number, because the mean of the others would favour what fails."""
        return fmean(self.scores.values()) if self.scores and not self.none else None

    @property
    def spread(self) -> float | None:
        """The standard deviation over seeds, if there is a mean."""
        return stdev(self.scores.values()) if len(self.scores) > 1 and not self.none else None

    @property
    def median(self) -> float | None:
        """The median, with a run without a number as the worst; None if the median is such a run."""
        count = len(self.scores) + len(self.none)
        best_first = sorted(self.scores.values(), reverse=not self.less)
        if count // 2 >= len(best_first):
            return None
        return best_first[count // 2] if count % 2 else fmean(best_first[count // 2 - 1 : count // 2 + 1])

    def ranked(self) -> dict[int, float]:
        """Seed -> value for an order; a run without a number is last."""
        return {**self.scores, **dict.fromkeys(self.none, math.inf if self.less else -math.inf)}

    def words(self, form: Callable[[float, float | None], str] = in_words) -> str:
        """The mean with its spread; without a mean the median, if there is one, and how many have a number."""
        if self.mean is not None:
            return form(self.mean, self.spread)
        if not self.none:
            return "none"
        told = f"{len(self.scores)} of {len(self.scores) + len(self.none)} have a number"
        return told if self.median is None else f"median {form(self.median, None)}; {told}"


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
        """Whether the interval excludes zero. If all gaps are equal, there is no interval, and nothing is decided."""
        return self.low != self.high and (self.low > 0 or self.high < 0)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval; None if all gaps are equal."""
        return None if self.low == self.high else (self.low, self.high)

    @property
    def verdict(self) -> str:
        """ "higher" or "lower" than the reference, or "undecided" if the interval contains zero. If all gaps are equal:
        "no spread", or "equal" if they are zero."""
        if self.low == self.high:
            return "no spread" if self.mean else "equal"
        return ("higher" if self.low > 0 else "lower") if self.decided else "undecided"


@dataclass(frozen=True)
class Placing:
    """The places of a label among the others. counts: of the first place, the second, ..., over the seeds that all
    have. Labels with equal scores (`digits.alike`) share the better place."""

    label: str
    counts: tuple[int, ...]

    @property
    def mean(self) -> float:
        return sum(place * count for place, count in enumerate(self.counts, start=1)) / sum(self.counts)


def score_cells(grid: Grid, number: str = "") -> list[CellScore]:
    """Every cell of the profile with its finished runs. number: a name, as in `Result.score`."""
    which, seeds = grid.which(number), len(grid.seeds)
    found = {tuple(cell.values()): CellScore(cell, {}, seeds, grid.choice(cell).value) for cell in grid.cells}
    for run in grid.runs:
        key, result = tuple(run.cell.values()), grid.results.get(run.digest)
        mine = found[key]
        if result is not None:
            less = parse_number(which).smaller_is_better(result.metric)
            unit = explained(which, result.metric) + (OWN_DATA if result.on_own_data(which) else "")
            mine = replace(mine, metric=result.metric, less=less, unit=unit)
        value = None if result is None else result.score(which)
        if value is not None:
            mine = replace(mine, scores={**mine.scores, run.seed: value})
        elif result is not None or run.digest in grid.failed:
            mine = replace(mine, none=(*mine.none, run.seed))
        found[key] = mine
    return list(found.values())


def without_number(cells: Sequence[CellScore]) -> list[str]:
    """A line for each cell with numbers on only some of its runs; "0 of 5" already says it if there are none."""
    return [
        f"{', '.join(cell.cell.values())}: no number on seed{'s' if len(cell.none) > 1 else ''} "
        f"{', '.join(map(str, cell.none))}: the run diverged, failed, stopped early or did not get there. So "
        f"there is no mean and no difference from another."
        for cell in cells
        if cell.none and cell.scores
    ]


def in_its_unit(which: str, cells: Sequence[CellScore]) -> str:
    """The number in words, with its unit."""
    return " or ".join(units_of(cells)) or explained(which, None)


def units_of(cells: Iterable[CellScore]) -> list[str]:
    """Each unit once, from cells that were run."""
    return list(dict.fromkeys(cell.unit for cell in cells if cell.unit is not None))


def of_two_units(cells: Sequence[CellScore], axis: str) -> list[str]:
    """A line for each place where labels of the axis have numbers in different units: these are not compared."""
    places: dict[str, list[CellScore]] = {}
    for cell in cells:
        where = ", ".join(label for name, label in cell.cell.items() if name != axis)
        places.setdefault(where, []).append(cell)
    return [
        f"{where + ': ' if where else ''}{'; '.join(f'{_labels(there, axis, unit)}: {unit}' for unit in units)}. "
        f"These are numbers of {_METRICS if len({cell.metric for cell in there if cell.metric}) > 1 else _DATA}"
        for where, there in places.items()
        if len(units := units_of(there)) > 1
    ]


_APART = "which are not compared: there is no difference and no place between them. To compare them,"
_METRICS = f"different metrics {_APART} give these cells one evaluate.metric."
_DATA = (
    f"different data {_APART} measure the clients' own models of all of them: set evaluate.target = 'clients'; or set "
    f"evaluate.clients_at_end = true and compare 'clients, last'."
)


def _labels(cells: Sequence[CellScore], axis: str, unit: str) -> str:
    return ", ".join(dict.fromkeys(cell.cell[axis] for cell in cells if cell.unit == unit))


def score_by(grid: Grid, told: Callable[[Result], Mapping[str, float]]) -> dict[tuple[str, str], dict[str, float]]:
    """(labels of the other axes, label of the row axis, with its metric if there are several) -> what `told`
    names -> its mean over seeds."""
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    mixed = len(grid.metrics) > 1
    for run, result in grid.used:
        where = ", ".join(run.cell[axis] for axis in grid.axes if axis != grid.rows)
        mine = found.setdefault((where, run.cell[grid.rows] + (f" ({result.metric})" if mixed else "")), {})
        for name, value in told(result).items():
            mine.setdefault(name, []).append(value)
    return {label: {name: fmean(x) for name, x in sorted(by.items())} for label, by in found.items() if by}


def placings(cells: Sequence[CellScore], axis: str) -> list[Placing]:
    """The places of the axis's labels, seed by seed; the cells differ only in that axis. Empty if no seed is in all, or
    their numbers have different metrics."""
    each = _orders(cells)
    if not each or not any(cell.scores for cell in cells):
        return []
    counts = [[sum(order[k] == place for order in each) for place in range(len(cells))] for k in range(len(cells))]
    return [Placing(cell.cell[axis], tuple(count)) for cell, count in zip(cells, counts, strict=True)]


def orders(cells: Sequence[CellScore]) -> tuple[int, int]:
    """The number of different orders of the cells over the seeds that all have, and the number of these seeds. An order
    with a shared place differs from those in which one of the two is ahead."""
    each = _orders(cells)
    return len({*each}), len(each)


def _orders(cells: Sequence[CellScore]) -> list[tuple[int, ...]]:
    """The places of the cells on each seed that all have."""
    if len(units_of(cells)) > 1:
        return []
    less = any(cell.less for cell in cells)
    ranked = [cell.ranked() for cell in cells]
    seeds = set.intersection(*map(set, ranked)) if cells else set()
    return [places([one[seed] for one in ranked], smaller_is_better=less) for seed in seeds]


def paired(cells: Sequence[CellScore], axis: str, reference: str) -> list[Difference]:
    """Each other label of the axis against the reference, with all other axes equal, over the seeds that both have.
    Pairs in which a run has no number are left out (`without_number`), because the other gaps would favour what fails;
    so are pairs with two units (`of_two_units`)."""
    differences = []
    for theirs in cells:
        if theirs.cell[axis] == reference:
            continue
        where = {name: label for name, label in theirs.cell.items() if name != axis}
        for ours in cells:
            if ours.cell[axis] == reference and all(ours.cell[name] == label for name, label in where.items()):
                seeds = sorted(set(ours.scores) & set(theirs.scores))
                if len(seeds) > 1 and not ours.none and not theirs.none and ours.unit == theirs.unit:
                    pairs = [(theirs.scores[seed], ours.scores[seed]) for seed in seeds]
                    differences.append(difference(reference, theirs.cell[axis], where, pairs))
    return differences


def difference(
    reference: str, other: str, where: Mapping[str, str], pairs: Sequence[tuple[float, float]]
) -> Difference:
    """The paired t interval of (other, reference) pairs. Differences by rounding (`digits.alike`) are not gaps."""
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
