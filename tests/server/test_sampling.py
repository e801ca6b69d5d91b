"""Who takes part: exact counts, stable seeds. Kind of evidence: oracle (hand-worked), property.

Counts are worked by hand with the largest-remainder rule; the two literal seeds come from `sha256sum`.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from fedlora.errors import ConfigError
from fedlora.seeds import derive_seed
from fedlora.server.sampling import sample_clients

FIFTY = [f"client-{k:02d}" for k in range(50)]

# ------------------------------------------------------------------------------------------------------ selection


def test_how_many_take_part() -> None:
    """max(1, round(fraction * n)), halves up: by hand. 2.5 of 5 rounds up, not to even; 0.4 of 4 is at least one."""
    for fraction, clients, size in ((1.0, 50, 50), (0.1, 50, 5), (0.5, 5, 3), (0.1, 4, 1), (1e-9, 50, 1), (1.0, 1, 1)):
        assert len(sample_clients(FIFTY[:clients], fraction, seed=0, round=0)) == size


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.0001, math.inf, math.nan])
def test_participation_outside_its_bounds_is_refused(fraction: float) -> None:
    with pytest.raises(ConfigError, match=r"participation is .*\(0, 1\]; got"):
        sample_clients(FIFTY, fraction, seed=0, round=0)


def test_a_sample_is_a_function_of_seed_round_and_the_set_of_clients() -> None:
    rounds = [sample_clients(FIFTY, 0.1, seed=4, round=t) for t in range(30)]
    assert [sample_clients(FIFTY[::-1], 0.1, seed=4, round=t) for t in range(30)] == rounds
    assert all(a != b for a, b in pairwise(rounds)) and all(a == sorted({*a} & {*FIFTY}) for a in rounds)
    assert [sample_clients(FIFTY, 0.1, seed=5, round=t) for t in range(30)] != rounds


# ---------------------------------------------------------------------------------------------------------- seeds


def test_seeds_never_change() -> None:
    """Pinned: another number would silently change every stored run. printf '%s' '[7, "train", 3, "site-1"]' |
    sha256sum: the first 16 hex digits, shifted right by one bit."""
    assert derive_seed(7, "train", 3, "site-1") == 8830096328244505815
    assert derive_seed(0, "select", 0) == 4192904909091225372
    assert len({derive_seed(*p) for p in ((1, "2"), ("1", 2), (1, 2), (2, 1), (12,), ("1,2",), ())}) == 7
