"""Shared by methods that average factors entry by entry: one common rank for all updates."""

from __future__ import annotations

from fedlora.errors import RankMismatch


def require_one_rank(method: str, rank: int, client: str | None, asked: int) -> None:
    """Raises `RankMismatch` unless the client's rank is the common one."""
    if asked != rank:
        raise RankMismatch(
            f"{method} averages factors entry by entry, so all clients need one rank: its state has rank {rank}, and "
            f"client {client!r} has {asked}. Use glora, flexlora, flora or hetlora, which serve clients of different "
            f"ranks."
        )
