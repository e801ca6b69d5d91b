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


@pytest.mark.parametrize(
    ("fraction", "clients", "size"),
    [
        (1.0, 50, 50),
        (0.1, 50, 5),
        (0.5, 5, 3),  # 2.5 rounds up, not to even
        (0.1, 4, 1),  # 0.4: at least one
        (1e-9, 50, 1),
        (0.29, 10, 3),
        (1.0, 1, 1),
    ],
)
def test_how_many_take_part(fraction: float, clients: int, size: int) -> None:
    """max(1, round(fraction * n)), halves up: by hand."""
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


@pytest.mark.parametrize(
    ("parts", "seed"),
    [
        # printf '%s' '[7, "train", 3, "site-1"]' | sha256sum: the first 16 hex digits, shifted right by one bit
        ((7, "train", 3, "site-1"), 8830096328244505815),
        ((0, "select", 0), 4192904909091225372),
    ],
)
def test_seeds_never_change(parts: tuple[str | int, ...], seed: int) -> None:
    """Pinned: another number would silently change every stored run."""
    assert derive_seed(*parts) == seed
