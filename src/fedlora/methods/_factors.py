"""Shared by methods that average factors entry by entry: weighted means, and the check for one common rank."""

from __future__ import annotations

from collections.abc import Sequence

from fedlora.core.method import Update
from fedlora.errors import RankMismatch

ANY_RANK = "Use glora, flexlora, flora or hetlora, which serve clients of different ranks."


def require_one_rank(method: str, rank: int, updates: Sequence[Update]) -> None:
    """Raises `RankMismatch` unless every update has exactly `rank` columns; a smaller one would broadcast or pad."""
    ranks = {u.client: u.lora.rank for u in updates}
    if any(r != rank for r in ranks.values()):
        raise RankMismatch(
            f"{method} averages factors entry by entry, so all clients need one rank, here {rank}; got {ranks}. "
            f"{ANY_RANK}"
        )


def require_readout_rank(method: str, rank: int, client: str | None, asked: int) -> None:
    """Raises `RankMismatch` unless the requested rank is the common one."""
    if asked != rank:
        raise RankMismatch(
            f"{method} averages factors entry by entry, so all clients need one rank: its state has rank {rank}, "
            f"and client {client!r} asks for {asked}. {ANY_RANK}"
        )
