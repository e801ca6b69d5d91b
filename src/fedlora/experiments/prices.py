"""What a row costs without an attack (`peace`), and saves elsewhere: on the test set after the last round."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from fedlora.experiments.grid import Grid
from fedlora.experiments.result import SCORES
from fedlora.experiments.tables import difference
from fedlora.training.metrics import METRICS


@dataclass(frozen=True)
class Price:
    """One row against the reference in one place. where: the labels of the other axes. peaceful: nobody attacks there.
    mean: of the row itself. better: its mean advantage over the reference, negative if it is worse, over the seeds that
    both have; low, high: its 95 % interval (paired t), None with one seed. If a run has no number, mean or better is
    NaN; better also if the reference was measured on other data, and then unlike is true."""

    row: str
    where: Mapping[str, str]
    peaceful: bool
    score: str
    pairs: int
    mean: float
    better: float
    low: float | None
    high: float | None
    unlike: bool = False


def prices(grid: Grid) -> list[Price]:
    """Every row in every place where row and reference share a seed, for each of `SCORES` that any run has; empty for
    an experiment without `peace`."""
    peace, reference = grid.experiment.peace, grid.experiment.reference
    if peace is None or reference is None:
        return []
    found: dict[tuple[str, str, tuple[tuple[str, str], ...]], dict[int, float]] = {}
    own = {(run.cell[grid.rows], result.on_own_data("test, last")) for run, result in grid.used}
    for run, result in grid.used:
        where = tuple((name, label) for name, label in run.cell.items() if name != grid.rows)
        for score in SCORES:
            value = result.tested(score)
            number = math.nan if value is None else value  # NaN: it diverged
            found.setdefault((score, run.cell[grid.rows], where), {})[run.seed] = number
    known = {key[0] for key, by_seed in found.items() if not all(map(math.isnan, by_seed.values()))}
    made = []
    for (score, row, where), ours in found.items():
        theirs = found.get((score, reference, where), {})
        seeds = sorted({*ours} & {*theirs})
        if not seeds or score not in known:
            continue
        up = 1.0 if METRICS[score].larger_is_better else -1.0
        pairs = [(up * ours[seed], up * theirs[seed]) for seed in seeds]
        unlike = {of for label, of in own if label == row} != {of for label, of in own if label == reference}
        whole = not unlike and not any(math.isnan(one) for pair in pairs for one in pair)
        gap = difference(reference, row, dict(where), pairs) if len(seeds) > 1 and whole else None
        alone = pairs[0][0] - pairs[0][1] if whole else math.nan
        better, low, high = (gap.mean, gap.low, gap.high) if gap else (alone, None, None)
        peaceful = dict(where).get(peace.axis) == peace.label
        mean = fmean(ours[seed] for seed in seeds)
        made.append(Price(row, dict(where), peaceful, score, len(seeds), mean, better, low, high, unlike))
    return made


def price_rows(found: Sequence[Price], score: str) -> tuple[list[str], list[list[str]]]:
    """(columns, rows) of one score's table in words: a row per label, peace first, "value (advantage)" in each cell."""
    of = [price for price in found if price.score == score]
    places = list(dict.fromkeys(_place(price) for price in sorted(of, key=lambda p: not p.peaceful)))
    labels = list(dict.fromkeys(price.row for price in of))
    at = {(price.row, _place(price)): price for price in of}
    rows = [[label, *(_cell(at.get((label, place))) for place in places)] for label in labels]
    peaceful = {_place(price) for price in of if price.peaceful}
    return ["", *(f"{place}: cost" if place in peaceful else f"{place}: saved" for place in places)], rows


def _place(price: Price) -> str:
    return ", ".join(price.where.values())


def _cell(price: Price | None) -> str:
    """The score, followed by its cost (peace) or saving, with the interval."""
    if price is None:
        return ""
    if price.unlike:
        return f"{price.mean:.3f} (other data: not compared)"
    if math.isnan(price.better):
        return "none: a run has no number"
    amount = (-price.better if price.peaceful else price.better) + 0.0  # no minus before a zero
    if price.low is None or price.high is None or price.low == price.high:
        return f"{price.mean:.3f} ({amount:+.3f})"
    low, high = (-price.high, -price.low) if price.peaceful else (price.low, price.high)
    return f"{price.mean:.3f} ({amount:+.3f}, {low:+.3f} to {high:+.3f})"
