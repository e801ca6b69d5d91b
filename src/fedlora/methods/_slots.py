"""Shared by methods that average rank slot by rank slot: zero-padding to a common rank."""

from __future__ import annotations

from torch.nn.functional import pad

from fedlora.core.lora import LoRA
from fedlora.errors import RankMismatch


def padded(lora: LoRA, rank: int) -> LoRA:
    """[B 0] and [A; 0] of `rank` slots; a factor that did not travel stays absent.

    Raises:
        RankMismatch: it has more slots than that, whose coordinates nobody else knows.
    """
    empty = rank - lora.rank
    if empty < 0:
        raise RankMismatch(
            f"an update of rank {lora.rank} does not fit into the common start's {rank} slots. Start the server from "
            f"an adapter of the largest rank."
        )
    B, A = lora.B, lora.A
    return LoRA(None if B is None else pad(B, (0, empty)), None if A is None else pad(A, (0, 0, 0, empty)))
