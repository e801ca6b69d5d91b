"""The clients' ranks: named profiles as exact counts. Pure functions of seeds."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from fedlora.seeds import derive_seed

RankProfile = Literal[
    "uniform", "normal", "heavy-tail", "heavy-tail-strong",
    "flexlora-uniform", "flexlora-normal", "flexlora-heavy-tail", "flexlora-heavy-tail-strong",
]  # fmt: skip


@dataclass(frozen=True, order=True)
class RankType:
    """One kind of client: its rank in attention modules and in all others (feed-forward)."""

    attention: int
    feed_forward: int

    def __str__(self) -> str:
        return str(self.attention) if self.attention == self.feed_forward else f"{self.attention}/{self.feed_forward}"

    def ranks(self, modules: Iterable[str]) -> int | dict[str, int]:
        """One rank for all modules, or module -> rank."""
        if self.attention == self.feed_forward:
            return self.attention
        return {name: self.attention if is_attention(name) else self.feed_forward for name in modules}


# The paper gives its five types' ranks only in a figure, so these are our choice (docs/explanation/paper-notes.md).
PAPER_TYPES = tuple(RankType(r, r) for r in (4, 8, 16, 32, 64))
# FlexLoRA's four types, by size: the authors' Type_0, Type_3, Type_2 and Type_1.
FLEXLORA_TYPES = (RankType(8, 8), RankType(30, 30), RankType(30, 200), RankType(200, 200))
# Their shares in the authors' code; "normal" is a bell over the authors' numbering, not over size.
_FLEXLORA_SHARES = {
    "flexlora-uniform": (0.25, 0.25, 0.25, 0.25),
    "flexlora-normal": (0.0575, 0.0575, 0.4425, 0.4425),
    "flexlora-heavy-tail": (0.80, 0.05, 0.05, 0.10),
    "flexlora-heavy-tail-strong": (0.05, 0.05, 0.10, 0.80),
}


def is_attention(module: str) -> bool:
    """Whether an adapted module belongs to attention, judged by its path (self_attn, attention)."""
    return any("att" in part.lower() for part in module.split("."))


def brings_types(profile: RankProfile) -> bool:
    """Whether the profile has its own client types."""
    return profile in _FLEXLORA_SHARES


def rank_shares(profile: RankProfile, kinds: int) -> list[float]:
    """The share of clients for each of `kinds` types, smallest first.

    uniform: equal. normal: a bell over the index (mu in the middle, sigma 1). heavy-tail: 80 % the smallest, the rest
    equally. heavy-tail-strong: mirrored, 80 % the largest. The GLoRA paper names these without numbers, so they are our
    reading (docs/explanation/paper-notes.md). flexlora-*: the shares in FlexLoRA's code, for its own four types.
    """
    if profile in _FLEXLORA_SHARES:
        return list(_FLEXLORA_SHARES[profile])
    if profile == "uniform":
        return [1 / kinds] * kinds
    if profile == "normal":
        bell = [math.exp(-((k - (kinds - 1) / 2) ** 2) / 2) for k in range(kinds)]
        return [b / sum(bell) for b in bell]
    if profile == "heavy-tail":
        return [0.8] + [0.2 / (kinds - 1)] * (kinds - 1) if kinds > 1 else [1.0]
    return rank_shares("heavy-tail", kinds)[::-1]


def rank_counts(profile: RankProfile, kinds: int, clients: int) -> list[int]:
    """How many of `clients` have each of `kinds` types: exact counts from the shares by largest remainder.

    Ties go to the smaller type first; in the mirrored profile, to the larger.
    """
    if profile == "heavy-tail-strong":
        return rank_counts("heavy-tail", kinds, clients)[::-1]
    shares = rank_shares(profile, kinds)
    quotas = [share / math.fsum(shares) * clients for share in shares]
    counts = [math.floor(q + 1e-9) for q in quotas]
    by_remainder = sorted(range(kinds), key=lambda k: (round(counts[k] - quotas[k], 9), k))
    for k in by_remainder[: clients - sum(counts)]:
        counts[k] += 1
    return counts


def assign_types(
    clients: Sequence[str], types: Sequence[RankType], profile: RankProfile, *, seed: int
) -> dict[str, RankType]:
    """Client -> its type: the profile's exact counts (`rank_counts`), shuffled by the seed.

    Args:
        types: ignored if the profile has its own.
    """
    types = FLEXLORA_TYPES if brings_types(profile) else sorted(types)
    counts = rank_counts(profile, len(types), len(clients))
    drawn = [kind for kind, count in zip(types, counts, strict=True) for _ in range(count)]
    random.Random(derive_seed(seed, "ranks")).shuffle(drawn)
    return dict(zip(sorted(clients), drawn, strict=True))
