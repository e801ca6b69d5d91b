"""Shared by methods that average factors entry by entry: one common rank for all updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedlora.core.method import Update
from fedlora.errors import RankMismatch
from fedlora.methods._slots import first


def of_one_rank(method: str, rank: int, updates: Sequence[Update]) -> list[Update]:
    """The updates with exactly `rank` columns each: one that came in subspace form with fewer gets zero slots.

    Raises:
        RankMismatch: a client's nominal rank is another.
    """
    for u in updates:
        require_one_rank(method, rank, u.client, u.rank)
    return [u if u.lora.rank == rank else replace(u, lora=first(u.lora, rank)) for u in updates]


def require_one_rank(method: str, rank: int, client: str | None, asked: int) -> None:
    """Raises `RankMismatch` unless the client's rank is the common one."""
    if asked != rank:
        raise RankMismatch(
            f"{method} averages factors entry by entry, so all clients need one rank: its state has rank {rank}, and "
            f"client {client!r} has {asked}. Use glora, flexlora, flora or hetlora, which serve clients of different "
            f"ranks."
        )
