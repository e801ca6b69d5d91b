"""Who takes part and with which rank: exact counts, stable seeds. Kind of evidence: oracle (hand-worked), property.

Counts are worked by hand with the largest-remainder rule; the two literal seeds come from `sha256sum`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest

from fedlora.errors import ConfigError
from fedlora.rounds import assign_ranks, rank_shares, sample_clients
from fedlora.seeds import derive_seed

FIFTY = [f"client-{k:02d}" for k in range(50)]
RANKS = (4, 8, 16, 32, 64)

# ---------------------------------------------------------------------------------------------------------- ranks


@pytest.mark.parametrize(
    ("profile", "counts"),
    [
        # 50 / 5
        ("uniform", (10, 10, 10, 10, 10)),
        # exp(-2), exp(-1/2), 1, ... of sum 2.483732: quotas 2.724, 12.210, 20.131, 12.210, 2.724, floors 2 12 20 12 2,
        # and the two left go to the two remainders of .724
        ("normal", (3, 12, 20, 12, 3)),
        # quotas 40, 2.5, 2.5, 2.5, 2.5: floors 40 2 2 2 2, and the two left go to the two smallest of the four
        ("heavy-tail", (40, 3, 3, 2, 2)),
        # the mirror of that
        ("heavy-tail-strong", (2, 2, 3, 3, 40)),
    ],
)
def test_fifty_clients_of_five_ranks(profile: str, counts: Sequence[int]) -> None:
    """By hand, written beside each row."""
    got = assign_ranks(FIFTY, RANKS, profile, seed=0)  # type: ignore[arg-type]
    assert Counter(got.values()) == dict(zip(RANKS, counts, strict=True))


@pytest.mark.parametrize(
    ("profile", "clients", "ranks", "counts"),
    [
        ("uniform", 7, (2, 4, 8), (3, 2, 2)),  # 7/3 each: floors 2 2 2, the one left to the smallest
        ("uniform", 2, (2, 4, 8), (1, 1, 0)),  # fewer clients than ranks
        ("heavy-tail", 1, (2, 4, 8), (1, 0, 0)),  # quotas .8 .1 .1
        ("heavy-tail-strong", 1, (2, 4, 8), (0, 0, 1)),
        ("heavy-tail", 10, (4, 8, 16), (8, 1, 1)),
        ("heavy-tail", 5, (8,), (5,)),  # one rank: everybody
        ("normal", 3, (4, 8), (2, 1)),  # symmetric: 1.5 each, the one left to the smaller
        ("uniform", 0, (4, 8), (0, 0)),
    ],
)
def test_small_federations(profile: str, clients: int, ranks: Sequence[int], counts: Sequence[int]) -> None:
    """By hand, written beside each row."""
    got = assign_ranks(FIFTY[:clients], ranks, profile, seed=3)  # type: ignore[arg-type]
    assert Counter(got.values()) == {r: n for r, n in zip(ranks, counts, strict=True) if n}
    assert set(got) == set(FIFTY[:clients])


@pytest.mark.parametrize("profile", ["uniform", "normal", "heavy-tail", "heavy-tail-strong"])
@pytest.mark.parametrize("clients", [1, 3, 10, 33, 50])
def test_counts_are_within_one_of_the_quota_and_fit_the_shares(profile: str, clients: int) -> None:
    """What largest remainder promises: floor(quota) or one more, all clients served."""
    shares = rank_shares(profile, 5)  # type: ignore[arg-type]
    assert math.fsum(shares) == pytest.approx(1)
    histogram = Counter(assign_ranks(FIFTY[:clients], RANKS, profile, seed=1).values())  # type: ignore[arg-type]
    assert sum(histogram.values()) == clients
    for rank, share in zip(RANKS, shares, strict=True):
        assert math.floor(share * clients + 1e-9) <= histogram.get(rank, 0) <= share * clients + 1


def test_the_strong_heavy_tail_mirrors_the_shares() -> None:
    """By hand: 80 % the largest, the rest alike."""
    assert rank_shares("heavy-tail-strong", 4) == rank_shares("heavy-tail", 4)[::-1]
    assert rank_shares("heavy-tail-strong", 4) == pytest.approx([1 / 15, 1 / 15, 1 / 15, 0.8])


def test_which_client_has_which_rank_is_the_seeds_alone() -> None:
    """Not the order of clients or ranks; another seed shuffles otherwise, with the same counts."""
    got = assign_ranks(FIFTY, RANKS, "normal", seed=5)
    assert assign_ranks(FIFTY[::-1], RANKS[::-1], "normal", seed=5) == got
    other = assign_ranks(FIFTY, RANKS, "normal", seed=6)
    assert other != got
    assert Counter(other.values()) == Counter(got.values())
    assert list(got.values()) != sorted(got.values())


def test_an_unknown_profile_is_named() -> None:
    with pytest.raises(ConfigError, match="unknown rank profile 'pareto'; known: uniform, normal, heavy-tail"):
        assign_ranks(FIFTY, RANKS, "pareto", seed=0)  # type: ignore[arg-type]


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
    with pytest.raises(ConfigError, match=r"participation is a share in \(0, 1\]; got"):
        sample_clients(FIFTY, fraction, seed=0, round=0)


def test_a_sample_is_sorted_without_repeats_and_of_known_clients() -> None:
    for t in range(20):
        got = sample_clients(FIFTY, 0.3, seed=2, round=t)
        assert got == sorted(set(got))
        assert set(got) <= set(FIFTY)


def test_a_sample_is_a_function_of_seed_round_and_the_set_of_clients() -> None:
    rounds = [sample_clients(FIFTY, 0.1, seed=4, round=t) for t in range(30)]
    assert [sample_clients(FIFTY[::-1], 0.1, seed=4, round=t) for t in range(30)] == rounds
    assert all(a != b for a, b in pairwise(rounds))
    assert [sample_clients(FIFTY, 0.1, seed=5, round=t) for t in range(30)] != rounds


def test_everybody_is_drawn_about_equally_often() -> None:
    """400 rounds of 10 %: 40 each in the mean, deviation sqrt(400 * .1 * .9) = 6; five of them are the limit."""
    counts = Counter(c for t in range(400) for c in sample_clients(FIFTY, 0.1, seed=0, round=t))
    assert all(abs(counts[c] - 40) < 30 for c in FIFTY)


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


def test_types_and_order_of_the_parts_count() -> None:
    parts = [(1, "2"), ("1", 2), (1, 2), ("1", "2"), (2, 1), (12,), ("12",), (1, "2", ""), ("1,2",), ()]
    assert len({derive_seed(*p) for p in parts}) == len(parts)


def test_seeds_fit_63_bits_and_any_text_is_a_part() -> None:
    """What `torch.Generator.manual_seed` takes; a client id may be any string."""
    for part in ("", "klient-ø", "日本", "a\nb", "\ud800", -1, 2**70):
        assert 0 <= derive_seed(0, part) < 2**63
