"""Which rank each client has: exact counts by named profiles. Kind of evidence: oracle (hand-worked), property.

Counts are worked by hand with the largest-remainder rule.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest

from fedlora.runs.rank_profiles import (
    FLEXLORA_TYPES,
    PAPER_TYPES,
    RankProfile,
    RankType,
    assign_types,
    is_attention,
    rank_counts,
    rank_shares,
)

FIFTY = [f"client-{k:02d}" for k in range(50)]
RANKS = (4, 8, 16, 32, 64)


def assign_ranks(clients: Sequence[str], ranks: Sequence[int], profile: RankProfile, *, seed: int) -> dict[str, int]:
    types = [RankType(r, r) for r in ranks]
    return {client: kind.attention for client, kind in assign_types(clients, types, profile, seed=seed).items()}


@pytest.mark.parametrize(
    ("profile", "total"), [("uniform", 620), ("normal", 502), ("heavy-tail", 212), ("heavy-tail-strong", 1364)]
)
def test_the_papers_types_at_half_participation(profile: RankProfile, total: int) -> None:
    """The expected sum of ranks of 25 of 50 clients, counts by hand: 25/50 * sum of count * rank."""
    counts = rank_counts(profile, 5, 50)
    assert sum(n * kind.attention for n, kind in zip(counts, PAPER_TYPES, strict=True)) / 2 == total


@pytest.mark.parametrize(
    ("profile", "counts"),
    [
        # 50/4 = 12.5 each: floors 12, and the two left go to the two smallest
        ("flexlora-uniform", (13, 13, 12, 12)),
        # quotas 2.875, 2.875, 22.125, 22.125: floors 2 2 22 22, and the two left go to the remainders of .875
        ("flexlora-normal", (3, 3, 22, 22)),
        # quotas 40, 2.5, 2.5, 5
        ("flexlora-heavy-tail", (40, 3, 2, 5)),
        # quotas 2.5, 2.5, 5, 40
        ("flexlora-heavy-tail-strong", (3, 2, 5, 40)),
    ],
)
def test_flexloras_profiles_bring_their_types(profile: RankProfile, counts: Sequence[int]) -> None:
    """Shares of the FlexLoRA code (methods.md section 12.4), by hand; whatever ranks are handed in."""
    got = assign_types(FIFTY, [RankType(1, 1)], profile, seed=0)
    assert Counter(got.values()) == dict(zip(FLEXLORA_TYPES, counts, strict=True))


def test_flexloras_normal_is_the_bell_over_the_authors_numbering() -> None:
    """N(1.5, 0.7) at Type_0 .. Type_3, normalised, by the density: Type_0 = 8, Type_1 = 200, Type_2 = 30/200."""
    density = [math.exp(-((k - 1.5) ** 2) / (2 * 0.7**2)) for k in range(4)]
    by_type = [d / sum(density) for d in density]
    by_size = [by_type[0], by_type[3], by_type[2], by_type[1]]
    assert rank_shares("flexlora-normal", 4) == pytest.approx(by_size, abs=5e-4)


@pytest.mark.parametrize(
    ("module", "attention"),
    [
        ("encoder.layer.0.attention.self.query", True),
        ("encoder.layer.0.attention.output.dense", True),
        ("encoder.layer.0.intermediate.dense", False),
        ("encoder.layer.0.output.dense", False),
        ("model.layers.3.self_attn.q_proj", True),
        ("model.layers.3.mlp.down_proj", False),
        ("transformer.h.1.attn.c_attn", True),
        ("encoder.block.0.layer.0.SelfAttention.q", True),
    ],
)
def test_which_modules_are_attention(module: str, attention: bool) -> None:
    """Module paths of BERT, LLaMA, GPT-2 and T5 as transformers names them."""
    assert is_attention(module) == attention
    ranks = RankType(30, 200).ranks([module])
    assert ranks == {module: 30 if attention else 200}
    assert RankType(8, 8).ranks([module]) == 8


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
