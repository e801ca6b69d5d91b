"""Compares and writes numbers: values that differ only by round-off count as equal, and other differences show."""

from __future__ import annotations

import math
from collections.abc import Sequence

ALIKE = 1e-5  # relative: results keep six digits, so that means of equal scores may differ by one unit in the last


def alike(a: float, b: float) -> bool:
    """Whether two scores are equal up to rounding."""
    return math.isclose(a, b, rel_tol=ALIKE, abs_tol=1e-12)


def places(scores: Sequence[float], *, smaller_is_better: bool = False) -> tuple[int, ...]:
    """The place of each, from 0: the number of better ones. Equal scores share the better place; those without a number
    (infinite) share the last one."""
    order = sorted(range(len(scores)), key=lambda k: scores[k] if smaller_is_better else -scores[k])
    found = [0] * len(scores)
    for place, k in enumerate(order):
        before = order[place - 1]
        found[k] = found[before] if place and alike(scores[k], scores[before]) else place
        if math.isinf(scores[k]):
            found[k] = len(scores) - 1
    return tuple(found)


def in_words(mean: float, spread: float | None = None) -> str:
    """ "0.8123" or "0.8123 ± 0.0210": four digits after the point, or more to show two digits of the spread (without a
    spread, of the number)."""
    if spread is None:
        return written(mean, mean)
    small = abs(mean) if spread <= ALIKE * abs(mean) else spread
    return f"{written(mean, small)} ± {written(spread, small)}"


def difference_in_words(mean: float, low: float, high: float, between: str = " .. ") -> tuple[str, str]:
    """(difference, interval), with enough digits to separate the interval's ends; "none" if they are equal."""
    if low == high:
        return written(mean, abs(mean), sign=True), "none"
    small = (high - low) / 2
    return written(
        mean, small, sign=True
    ), f"{written(low, small, sign=True)}{between}{written(high, small, sign=True)}"


def written(value: float, small: float, *, sign: bool = False) -> str:
    """`value` with digits down to two significant ones of `small`, and at least four after the point."""
    plus = "+" if sign else ""
    if not math.isfinite(small) or small == 0:
        return f"{value:{plus}.4f}"
    digits = max(4, 1 - math.floor(math.log10(abs(small))))
    return f"{value:{plus}.{digits}f}" if digits <= 9 else f"{value:{plus}.2e}"


def shown(value: float) -> str:
    """A setting's value, as short as possible but exact: 0.003, 1e-05, 0.0010000001."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
