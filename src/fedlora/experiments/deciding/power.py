"""What a number of seeds can show, before they are run: the smallest gap, and whether equals are found equal.

Of one question of a family of K, at the level of the family's first step, alpha / K: later steps are easier, so that
both numbers are on the safe side. Gaps are normal, with the spread of the pilot.

smallest gap       two-sided t test with n seeds, on the right side: power = P(T > t(1 - level / 2)), T noncentral t
                   with n - 1 degrees of freedom and noncentrality gap sqrt(n) / spread; solved for the gap
chance of equals   two one-sided t tests at a true gap of 0 (Schuirmann 1987; Phillips 1990): both reject where
                   |mean| < margin - t(1 - level) s / sqrt(n). Mean and s are independent, so that the chance is
                   2 Phi(margin sqrt(n) / spread - t s / spread) - 1 in the mean over s, by quadrature
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fedlora.experiments.deciding.claims import Claims, Family


@dataclass(frozen=True)
class Power:
    """Of one question. spread: of its gaps in the pilot; gap: the smallest true one that is shown to be there, with the
    power of the claims; both in the score's unit. equal: the chance to find equivalent what is equal."""

    spread: float
    gap: float
    equal: float


def powers(claims: Claims, family: Family, spreads: Mapping[str, float], seeds: int) -> dict[str, Power]:
    """Question -> what so many seeds can show. spreads: question -> standard deviation of its gaps, as plans have."""
    level = claims.alpha / len(family.questions)
    return {
        question: Power(
            spread,
            smallest_gap(spread, seeds, level, claims.power),
            chance_of_equals(spread, family.margin, seeds, level),
        )
        for question, spread in spreads.items()
    }


def smallest_gap(spread: float, seeds: int, level: float, power: float) -> float:
    """The true mean gap that a two-sided t test at `level` finds with that power; 0 for gaps without spread.

    Raises:
        ValueError: fewer than two seeds.
    """
    if seeds < 2:
        raise ValueError(f"a t test takes two seeds or more; got {seeds}.")
    if spread == 0:
        return 0.0
    from scipy import optimize, stats

    bound = float(stats.t.ppf(1 - level / 2, seeds - 1))

    def found(noncentrality: float) -> float:
        """The other side's rejections are of the wrong sign, and do not count."""
        return float(stats.nct.sf(bound, seeds - 1, noncentrality))

    end = bound
    while found(end) < power:
        end *= 1.5
    return float(optimize.brentq(lambda at: found(at) - power, 0.0, end)) * spread / math.sqrt(seeds)


def chance_of_equals(spread: float, margin: float, seeds: int, level: float) -> float:
    """The chance that both one-sided tests at `level` reject where the true gap is 0; 1 for gaps without spread.

    Raises:
        ValueError: fewer than two seeds.
    """
    if seeds < 2:
        raise ValueError(f"a t test takes two seeds or more; got {seeds}.")
    if spread == 0:
        return 1.0
    from scipy import integrate, stats

    df, reach = seeds - 1, margin * math.sqrt(seeds) / spread
    bound = float(stats.t.ppf(1 - level, df))
    end = df * (reach / bound) ** 2  # of s^2 df / spread^2, which is chi-squared: beyond it nothing is equivalent
    limit = min(end, float(stats.chi2.isf(1e-12, df)))

    def inside(x: float) -> float:
        return (2 * float(stats.norm.cdf(reach - bound * math.sqrt(x / df))) - 1) * float(stats.chi2.pdf(x, df))

    value, _ = integrate.quad(inside, 0.0, limit, limit=200)
    return min(1.0, max(0.0, float(value)))


def per_cent(chance: float) -> str:
    """ "3 %"; what is next to never or next to always is not called never or always."""
    if chance < 0.01:
        return "below 1 %"
    return "above 99 %" if chance > 0.99 else f"{100 * chance:.0f} %"
