"""Weights of a merge. Kinds of evidence: by hand, refusals."""

from __future__ import annotations

import pytest

from fedlora.adapters.collection import used_weights
from fedlora.errors import ConfigError


def test_weights_by_hand() -> None:
    """A mean divides by the sum, a sum does not."""
    assert used_weights(2, [1, 3]) == (0.25, 0.75) and used_weights(2, [1, -3], sum=True) == (1, -3)
    assert used_weights(3) == (1 / 3, 1 / 3, 1 / 3) and used_weights(3, sum=True) == (1, 1, 1)


@pytest.mark.parametrize(
    ("weights", "sum", "said"),
    [
        ([1, 2, 3], False, "3 weights for 2 adapters"),
        ([1, float("nan")], True, "finite"),
        ([1, float("inf")], False, "finite"),
        ([1e308, 1e308], False, "from 1e-12 to 1e[+]12"),
        ([10**400, 1], False, "from 1e-12 to 1e[+]12"),
        ([5e-324, 1], False, "from 1e-12 to 1e[+]12"),
        ([1e-9, 1e9], True, "too far apart"),
        ([-1, 2], False, "--sum"),
        ([0, 0], False, "may be zero"),
        ([0, 0], True, "may be zero"),
        (["1", 2], False, "weights must be numbers"),
        ([True, 2], False, "weights must be numbers"),
    ],
)
def test_absurd_weights_are_refused(weights: list[float], sum: bool, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        used_weights(2, weights, sum=sum)


def test_the_smallest_weight_is_taken() -> None:
    assert used_weights(1, [1e-12], sum=True) == (1e-12,)
