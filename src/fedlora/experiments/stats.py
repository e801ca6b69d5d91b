"""Paired comparisons: t interval, Holm, equivalence at a margin, seeds that a decision would take.

Runs of one seed share split, partition, start and order, so gaps are paired by seed. For a margin each comparison has
two null hypotheses: "same" (the mean gap is 0; a two-sided t test) and "matters" (|mean gap| >= margin; two one-sided
tests, Schuirmann 1987). At most one of the two is true, so of 2 m hypotheses at most as many are true as there are
comparisons with one left: Holm's procedure with this count (Shaffer 1986) keeps the error rate of the whole table at
alpha.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

K = TypeVar("K", bound=Hashable)
ALPHA, POWER, MOST = 0.05, 0.8, 1000


@dataclass(frozen=True)
class Gap:
    """mean, sd: of the paired gaps. low, high: the 95 % interval. p: of no difference. matters: of a difference of the
    margin or more. NaN: not known, as everything but the mean is of one seed."""

    n: int
    mean: float
    sd: float = math.nan
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    matters: float = math.nan


def paired(gaps: Sequence[float], margin: float | None = None) -> Gap:
    """The gap of finite differences, one for each seed. Equal ones have no spread and decide nothing: coarse scores
    of few seeds are often equal."""
    from scipy import stats

    x = np.asarray(gaps, float)
    n, mean = len(x), float(x.mean())
    if n < 2:
        return Gap(n, mean)
    if np.ptp(x) <= 1e-12:
        return Gap(n, mean, 0.0)
    t, sd = stats.t(n - 1), float(x.std(ddof=1))
    error = sd / math.sqrt(n)
    reach = float(t.ppf(1 - ALPHA / 2)) * error
    matters = math.nan if margin is None else float(t.sf((margin - abs(mean)) / error))
    return Gap(n, mean, sd, mean - reach, mean + reach, float(2 * t.sf(abs(mean) / error)), matters)


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's adjusted p values, in the given order; NaN counts as a comparison and stays NaN."""
    order = np.argsort(np.nan_to_num(ps, nan=2.0), kind="stable")
    found, largest = [math.nan] * len(ps), 0.0
    for rank, at in enumerate(order):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[at]))
        found[at] = math.nan if math.isnan(ps[at]) else largest
    return found


def verdicts(family: Mapping[K, Gap], *, larger_is_better: bool) -> dict[K, str]:
    """better, worse, equivalent or undecided, at one error rate for all. Both hypotheses rejected: equivalent."""
    left = {name: {"p", "matters"} for name in family}
    known = [(getattr(gap, kind), kind, name) for name, gap in family.items() for kind in ("p", "matters")]
    for p, kind, name in sorted((one for one in known if not math.isnan(one[0])), key=lambda one: one[:2]):
        if p > ALPHA / sum(map(bool, left.values())):
            break
        left[name].discard(kind)

    def word(name: K) -> str:
        if "matters" not in left[name]:
            return "equivalent"
        if "p" in left[name]:
            return "undecided"
        return "better" if (family[name].mean > 0) == larger_is_better else "worse"

    return {name: word(name) for name in family}


def seeds_needed(sd: float, margin: float, comparisons: int = 1) -> int:
    """The smallest number of seeds that finds a true difference of 0 equivalent, with this power at Holm's first step:
    by the noncentral t distribution, each one-sided test with power 1 - (1 - power) / 2. `MOST` if more are needed.
    sd: above 0."""
    from scipy import stats

    level, each = ALPHA / comparisons, 1 - (1 - POWER) / 2
    for n in range(2, MOST):
        bound, shift = float(stats.t.ppf(1 - level, n - 1)), margin / sd * math.sqrt(n)
        found = float(stats.nct.sf(bound, n - 1, shift))
        if found >= each or (math.isnan(found) and shift > bound):  # scipy's nct fails far beyond the bound
            return n
    return MOST
