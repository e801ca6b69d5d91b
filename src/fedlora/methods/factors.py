"""What the methods that average factors entry by entry share: weighted means, and the one rank they need."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fedlora.errors import RankMismatch
from fedlora.method import Update

ANY_RANK = "Use glora, flexlora, flora or hetlora, which serve clients of different ranks."


def weighted_mean(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """sum_i w_i X_i for tensors of one shape, added up in the order given."""
    total = tensors[0] * weights[0]
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        total = total.add(tensor, alpha=weight)
    return total


def require_one_rank(method: str, rank: int, updates: Sequence[Update]) -> None:
    """Raises `RankMismatch` unless every update has exactly `rank` columns: a smaller one would broadcast or pad."""
    ranks = {u.client: u.lora.rank for u in updates}
    if any(r != rank for r in ranks.values()):
        raise RankMismatch(
            f"{method} averages factors entry by entry, so all clients need one rank, here {rank}; got {ranks}. "
            f"{ANY_RANK}"
        )


def require_readout_rank(method: str, rank: int, client: str | None, asked: int) -> None:
    """Raises `RankMismatch` unless the asked rank is the common one."""
    if asked != rank:
        raise RankMismatch(
            f"{method} averages factors entry by entry, so all clients need one rank: its state has rank {rank}, "
            f"and client {client!r} asks for {asked}. {ANY_RANK}"
        )
