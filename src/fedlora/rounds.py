"""A round besides the method: who takes part, and which rank each client has. Pure functions of seeds."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Literal

from fedlora.errors import ConfigError
from fedlora.seeds import derive_seed

RankProfile = Literal["uniform", "normal", "heavy-tail", "heavy-tail-strong"]


def sample_clients(clients: Sequence[str], fraction: float, *, seed: int, round: int) -> list[str]:
    """The participants of one round, sorted: max(1, round(fraction * n)) of them, without replacement.

    A function of (seed, round) and the set of clients only. Source: docs/methods.md, client selection.
    """
    if not clients:
        raise ConfigError("there are no clients to sample from.")
    if not 0 < fraction <= 1:
        raise ConfigError(f"participation is a share in (0, 1]; got {fraction}.")
    size = max(1, math.floor(fraction * len(clients) + 0.5))
    return sorted(random.Random(derive_seed(seed, "select", round)).sample(sorted(clients), size))


def rank_shares(profile: RankProfile, kinds: int) -> list[float]:
    """The share of clients that has each of `kinds` ranks, in ascending order of rank.

    uniform: equal. normal: a bell over the index (mu in the middle, sigma 1). heavy-tail: 80 % the smallest rank, the
    rest alike. heavy-tail-strong: mirrored, 80 % the largest. Source: FlexLoRA's client types; the GLoRA paper names
    the profiles without numbers, so these are our reading (docs/paper-notes.md).
    """
    if profile == "uniform":
        return [1 / kinds] * kinds
    if profile == "normal":
        bell = [math.exp(-((k - (kinds - 1) / 2) ** 2) / 2) for k in range(kinds)]
        return [b / sum(bell) for b in bell]
    if profile == "heavy-tail":
        return [0.8] + [0.2 / (kinds - 1)] * (kinds - 1) if kinds > 1 else [1.0]
    if profile == "heavy-tail-strong":
        return rank_shares("heavy-tail", kinds)[::-1]
    raise ConfigError(f"unknown rank profile {profile!r}; known: uniform, normal, heavy-tail, heavy-tail-strong.")


def rank_counts(profile: RankProfile, kinds: int, clients: int) -> list[int]:
    """How many of `clients` have each of `kinds` ranks: the shares' exact counts by largest remainder.

    Equal remainders go to the smaller rank first, and in the mirrored profile to the larger one.
    """
    if profile == "heavy-tail-strong":
        return rank_counts("heavy-tail", kinds, clients)[::-1]
    quotas = [share * clients for share in rank_shares(profile, kinds)]
    counts = [math.floor(q + 1e-9) for q in quotas]
    by_remainder = sorted(range(kinds), key=lambda k: (round(counts[k] - quotas[k], 9), k))
    for k in by_remainder[: clients - sum(counts)]:
        counts[k] += 1
    return counts


def assign_ranks(clients: Sequence[str], ranks: Sequence[int], profile: RankProfile, *, seed: int) -> dict[str, int]:
    """Client -> rank: the profile's exact counts (`rank_counts`), shuffled by the seed."""
    ranks = sorted(ranks)
    counts = rank_counts(profile, len(ranks), len(clients))
    drawn = [rank for rank, count in zip(ranks, counts, strict=True) for _ in range(count)]
    random.Random(derive_seed(seed, "ranks")).shuffle(drawn)
    return dict(zip(sorted(clients), drawn, strict=True))
