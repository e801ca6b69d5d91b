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
    RankProfile,
    RankType,
    assign_types,
    rank_shares,
)

FIFTY = [f"client-{k:02d}" for k in range(50)]
RANKS = (4, 8, 16, 32, 64)


def test_flexloras_normal_is_the_bell_over_the_authors_numbering() -> None:
    """N(1.5, 0.7) at Type_0 .. Type_3, normalised, by the density: Type_0 = 8, Type_1 = 200, Type_2 = 30/200."""
    density = [math.exp(-((k - 1.5) ** 2) / (2 * 0.7**2)) for k in range(4)]
    by_type = [d / sum(density) for d in density]
    by_size = [by_type[0], by_type[3], by_type[2], by_type[1]]
    assert rank_shares("flexlora-normal", 4) == pytest.approx(by_size, abs=5e-4)


def test_which_modules_are_attention() -> None:
    """Module paths of BERT, LLaMA, GPT-2 and T5 as transformers names them."""
    attention = ["encoder.layer.0.attention.self.query", "h.1.attn.c_attn", "encoder.block.0.layer.0.SelfAttention.q"]
    other = ["encoder.layer.0.output.dense", "model.layers.3.mlp.down_proj"]
    assert RankType(30, 200).ranks([*attention, *other]) == dict.fromkeys(attention, 30) | dict.fromkeys(other, 200)
    assert RankType(8, 8).ranks(attention) == 8


def test_which_client_has_which_rank_is_the_seeds_alone() -> None:
    """Not the order of clients or ranks; another seed shuffles otherwise, with the same counts."""
    types = [RankType(r, r) for r in RANKS]
    got = assign_types(FIFTY, types, "normal", seed=5)
    assert assign_types(FIFTY[::-1], types[::-1], "normal", seed=5) == got
    other = assign_types(FIFTY, types, "normal", seed=6)
    assert other != got
    assert Counter(other.values()) == Counter(got.values())
    assert list(got.values()) != sorted(got.values())


@pytest.mark.parametrize(
    ("profile", "clients", "counts"),
    [
        ("uniform", 50, (10, 10, 10, 10, 10)),
        ("uniform", 2, (1, 1, 0, 0, 0)),  # ties go to the smaller
        # exp(-2), exp(-1/2), 1, ... of sum 2.483732: quotas 2.724, 12.210, 20.131, 12.210, 2.724, floors 2 12 20 12 2,
        # and the two left go to the two remainders of .724
        ("normal", 50, (3, 12, 20, 12, 3)),
        # quotas 40, 2.5, 2.5, 2.5, 2.5: floors 40 2 2 2 2, and the two left go to the two smallest of the four
        ("heavy-tail", 50, (40, 3, 3, 2, 2)),
        ("heavy-tail-strong", 50, (2, 2, 3, 3, 40)),  # the mirror of that
        ("heavy-tail-strong", 1, (0, 0, 0, 0, 1)),
        # FlexLoRA's shares (methods.md section 12.4) of its own four types. 50 / 4 = 12.5 each
        ("flexlora-uniform", 50, (13, 13, 12, 12)),
        ("flexlora-normal", 50, (3, 3, 22, 22)),  # quotas 2.875, 2.875, 22.125, 22.125
        ("flexlora-heavy-tail", 50, (40, 3, 2, 5)),  # quotas 40, 2.5, 2.5, 5
        ("flexlora-heavy-tail-strong", 50, (3, 2, 5, 40)),
    ],
)
def test_counts_by_hand(profile: RankProfile, clients: int, counts: Sequence[int]) -> None:
    types = FLEXLORA_TYPES if profile.startswith("flexlora") else [RankType(r, r) for r in RANKS]
    got = Counter(assign_types(FIFTY[:clients], [RankType(r, r) for r in RANKS], profile, seed=3).values())
    assert got == {kind: n for kind, n in zip(types, counts, strict=True) if n}
