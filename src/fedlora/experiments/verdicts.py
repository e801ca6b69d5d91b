"""Better, worse, equivalent or undecided: paired differences of a family of questions, and one error rate for all.

For each question there are two hypotheses about the mean paired difference d, with scipy's p-value of each:

    same     d = 0         paired t test, two-sided; rejected: better or worse, by the sign of the mean
    matters  |d| >= margin two one-sided t tests (TOST), the larger p; rejected: equivalent

All 2 K hypotheses of a family of K questions go through Holm's step-down with Shaffer's count (1986): sorted by p, each
is compared with alpha / (questions with a hypothesis not yet rejected), until one fails. At most one of a question's
two hypotheses is true, so never more are true than questions are open: the chance that a family rejects a true one is
at most alpha, whatever the dependence between questions. (A simulation tests that the sign of a rejected "same" is also
right.) If both are rejected, a difference exists but is too small to matter: equivalent.
Source: Holm (1979), Shaffer (1986), Schuirmann (1987) for TOST.

Before the seeds are run, for one question of a family of K at the level of its first step, alpha / K (later steps are
easier, so both numbers are safe), if gaps are normal with the pilot's spread:

    smallest gap      power = P(T > t(1 - level / 2)), T noncentral t with n - 1 degrees of freedom and noncentrality
                      gap sqrt(n) / spread; solved for the gap
    chance of equals  both one-sided tests reject at a true gap of 0 where |mean| < margin - t(1 - level) s / sqrt(n).
                      Mean and s are independent: 2 Phi(margin sqrt(n) / spread - t s / spread) - 1 in the mean over s,
                      by quadrature (Phillips 1990)
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

Verdict = Literal["better", "worse", "equivalent", "undecided"]
ALPHA, POWER = 0.05, 0.8
MOST = 10_000  # seeds: beyond it no number is computed, and words say "or more"
_ROUNDING = 1e-12  # for a difference of scores, which have six digits and a size around 1


@dataclass(frozen=True)
class Weighed:
    """One question, before its family is judged. gaps: by seed, in the metric's unit, positive if the first is better.
    p_same, p_matters: of the two hypotheses. low, high: 95 % interval of the mean (t)."""

    gaps: tuple[float, ...]
    margin: float
    p_same: float
    p_matters: float
    low: float
    high: float

    @property
    def mean(self) -> float:
        return fmean(self.gaps)

    @property
    def spread(self) -> float:
        """The standard deviation over seeds."""
        return stdev(self.gaps)

    @property
    def ahead(self) -> int:
        """The number of seeds on which the first is better: a check that no single outlier makes the mean."""
        return sum(gap > 0 for gap in self.gaps)


def weigh(gaps: Sequence[float], margin: float) -> Weighed:
    """Both tests on one question's paired gaps.

    Gaps without any spread (equal on every seed, except for the last bits of a difference) leave a t test nothing to
    divide by: they are taken as they are.

    Raises:
        ValueError: fewer than two gaps, one that is not a finite number, or a margin that is not positive.
    """
    if len(gaps) < 2 or not all(map(math.isfinite, gaps)) or not 0 < margin < math.inf:
        raise ValueError(f"a test takes two finite gaps or more and a margin > 0; got {list(gaps)}, {margin}.")
    found = tuple(map(float, gaps))
    if _alike(found):
        at = fmean(found) if abs(fmean(found)) > _ROUNDING else 0.0
        return Weighed(found, margin, 1.0 if at == 0 else 0.0, 0.0 if abs(at) < margin else 1.0, at, at)
    from scipy import stats

    same = stats.ttest_1samp(found, 0.0)
    interval = same.confidence_interval(0.95)
    above = stats.ttest_1samp(found, -margin, alternative="greater").pvalue
    below = stats.ttest_1samp(found, margin, alternative="less").pvalue
    return Weighed(
        found, margin, float(same.pvalue), float(max(above, below)), float(interval.low), float(interval.high)
    )


def judge(family: Mapping[str, Weighed], alpha: float = ALPHA, *, others: int = 0) -> dict[str, Verdict]:
    """Question -> verdict, at one error rate for the family. A question with both hypotheses rejected is equivalent.

    others: further questions of the family without a test; they stay open.
    """
    hypotheses = sorted(
        [(test.p_same, name, "same") for name, test in family.items()]
        + [(test.p_matters, name, "matters") for name, test in family.items()]
    )
    left = {name: {"same", "matters"} for name in family}
    for p, name, kind in hypotheses:
        open_questions = others + sum(bool(kinds) for kinds in left.values())
        if p > alpha / open_questions:
            break
        left[name].discard(kind)
    return {name: _verdict(test, left[name]) for name, test in family.items()}


def _verdict(test: Weighed, left: set[str]) -> Verdict:
    if "matters" not in left:
        return "equivalent"
    if "same" not in left:
        return "better" if test.mean > 0 else "worse"
    return "undecided"


def seeds_needed(
    spread: float, margin: float, questions: int, *, alpha: float = ALPHA, power: float = POWER, most: int = MOST
) -> int:
    """The smallest number of seeds that finds a difference of zero equivalent with that power, at the level of a
    family's first step (alpha / questions); it also finds a difference of twice the margin. `most` if more would be
    needed.

    spread: the standard deviation of the paired gaps, from a pilot. By the noncentral t distribution, each of the two
    one-sided tests with power 1 - (1 - power) / 2.
    """
    return _seeds_for(margin, spread, alpha / questions, 1 - (1 - power) / 2, most)


def seeds_to_beat(lead: float, spread: float, alpha: float, *, power: float = POWER, most: int = MOST) -> int | None:
    """The smallest number of seeds with which a one-sided t test finds this lead over the margin; None for no lead.

    lead: the mean of the gaps less the margin. spread: their standard deviation.
    """
    return None if lead <= 0 else _seeds_for(lead, spread, alpha, power, most)


def _seeds_for(gap: float, spread: float, level: float, power: float, most: int) -> int:
    """The smallest number of seeds, from 2, with which a one-sided t test at `level` finds that gap with that power;
    `most` if no smaller one does. More seeds have more power, so doubling and bisection find it, from below, because
    scipy's noncentral t fails far beyond the needed number."""
    from scipy import stats

    if spread == 0:
        return 2

    def enough(n: int) -> bool:
        bound = float(stats.t.ppf(1 - level, n - 1))
        return float(stats.nct.sf(bound, n - 1, gap / spread * math.sqrt(n))) >= power

    end = 2
    while end < most and not enough(end):
        end *= 2
    if end > most:
        end = most
    start = end // 2 + 1 if end > 2 else 2
    return start + bisect_left(range(start, end), True, key=enough)


def beats_by(gaps: Sequence[float], margin: float, alpha: float = ALPHA) -> tuple[bool, float]:
    """(whether the mean of the gaps is above the margin, p): one one-sided t test at alpha. For gates."""
    if _alike(gaps):
        ahead = fmean(gaps) > margin + _ROUNDING
        return ahead, 0.0 if ahead else 1.0
    from scipy import stats

    p = float(stats.ttest_1samp(gaps, margin, alternative="greater").pvalue)
    return p <= alpha, p


def _alike(gaps: Sequence[float]) -> bool:
    return max(gaps) - min(gaps) <= _ROUNDING


# ---- before the seeds are run ----------------------------------------------------------------------------------------


def smallest_gap(spread: float, seeds: int, level: float, power: float) -> float:
    """The true mean gap that a two-sided t test at `level` finds with that power; 0 for gaps without spread.

    Raises:
        ValueError: fewer than two seeds.
    """
    _check_seeds(seeds)
    if spread == 0:
        return 0.0
    from scipy import optimize, stats

    bound = float(stats.t.ppf(1 - level / 2, seeds - 1))

    def found(noncentrality: float) -> float:
        """The power; rejections on the other side have the wrong sign and do not count."""
        return float(stats.nct.sf(bound, seeds - 1, noncentrality))

    end = bound
    while found(end) < power:
        end *= 1.5
    return float(optimize.brentq(lambda at: found(at) - power, 0.0, end)) * spread / math.sqrt(seeds)


def chance_of_equals(spread: float, margin: float, seeds: int, level: float) -> float:
    """The chance that both one-sided tests at `level` reject if the true gap is 0; 1 for gaps without spread.

    Raises:
        ValueError: fewer than two seeds.
    """
    _check_seeds(seeds)
    if spread == 0:
        return 1.0
    from scipy import integrate, stats

    df, reach = seeds - 1, margin * math.sqrt(seeds) / spread
    bound = float(stats.t.ppf(1 - level, df))
    end = df * (reach / bound) ** 2  # of s^2 df / spread^2, a chi-squared variable: beyond it nothing is equivalent
    limit = min(end, float(stats.chi2.isf(1e-12, df)))

    def inside(x: float) -> float:
        return (2 * float(stats.norm.cdf(reach - bound * math.sqrt(x / df))) - 1) * float(stats.chi2.pdf(x, df))

    value, _ = integrate.quad(inside, 0.0, limit, limit=200)
    return min(1.0, max(0.0, float(value)))


def _check_seeds(seeds: int) -> None:
    if seeds < 2:
        raise ValueError(f"a t test takes two seeds or more; got {seeds}.")


def per_cent(chance: float) -> str:
    """ "3 %"; almost never and almost always are not rounded to never and always."""
    if chance < 0.01:
        return "below 1 %"
    return "above 99 %" if chance > 0.99 else f"{100 * chance:.0f} %"
