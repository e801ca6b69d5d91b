"""How much each adapter counts in a merge."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedlora.errors import ConfigError

_LARGEST, _SMALLEST = 1e12, 1e-12  # bounds on a weight, and relative to the largest: beyond these it is a typo


def used_weights(count: int, weights: Sequence[float] | None = None, *, sum: bool = False) -> tuple[float, ...]:
    """The weights of `count` adapters as used: divided by their sum for a mean, unchanged for a sum.

    Args:
        weights: one each; None: all equal. sum: weights may be negative.

    Raises:
        ConfigError: wrong number of weights; a weight is not a number, or absurdly small beside the others; in a mean,
            a weight is negative.

    Example:
        >>> used_weights(2, [1, 3]), used_weights(2, [1, -1], sum=True)
        ((0.25, 0.75), (1.0, -1.0))
    """
    given = (1.0,) * count if weights is None else _numbers(weights)
    if len(given) != count:
        raise ConfigError(f"there are {len(given)} weights for {count} adapters.")
    if not all(math.isfinite(w) for w in given):
        raise ConfigError(f"weights must be finite numbers; got {list(given)}.")
    if not sum and any(w < 0 for w in given):
        raise ConfigError(
            f"weights of a mean cannot be negative; got {list(given)}. --sum (sum=True) uses them as they are."
        )
    sizes = [abs(w) for w in given if w]
    if not sizes:
        raise ConfigError(f"not all weights may be zero; got {list(given)}.")
    if max(sizes) > _LARGEST or min(sizes) < _SMALLEST:
        raise ConfigError(f"weights must be from {_SMALLEST:g} to {_LARGEST:g} in size, or 0; got {list(given)}.")
    if min(sizes) < _SMALLEST * max(sizes):
        raise ConfigError(
            f"the weights are too far apart: {min(sizes):g} beside {max(sizes):g} would count for nothing. Leave "
            f"that adapter out, or give it weight 0."
        )
    total = 1.0 if sum else math.fsum(given)
    return tuple(w / total for w in given)


def _numbers(values: Sequence[float]) -> tuple[float, ...]:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"weights must be numbers; got {str(value)[:80]!r}.")
    try:
        return tuple(map(float, values))
    except OverflowError as error:  # an integer too large for a float
        raise ConfigError(f"weights must be from {_SMALLEST:g} to {_LARGEST:g} in size, or 0.") from error
