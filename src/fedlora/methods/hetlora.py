"""HetLoRA: zero-pad the factors, weigh clients by the size of their update, cut to each rank (Cho et al., 2401.06432).

    w_i = ||B_i A_i||_F / sum_j ||B_j A_j||_F
    B <- sum_i w_i [B_i 0]        A <- sum_i w_i [A_i; 0]        read out: B[:, :r_i], A[:r_i, :]

Any ranks, which stay as they are; not exact, not gauge-invariant (the weights are, because they depend on products).
Each module has its own weights. If every update is zero, as in a first round without training, p_i is used. The same
with p_i in place of w_i is `padded-average`. Cost: O(sum r_i^2 (d_out + d_in)), by QR factors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from fedlora.core.lora import LoRA
from fedlora.core.method import Method, Update
from fedlora.methods._shared import padded
from fedlora.methods.fedit import mean_factors


@dataclass(frozen=True)
class HetLoRA(Method[LoRA]):
    """Use it as the factor-averaging baseline for clients of different ranks.

    State: the averaged zero-padded pair, at the largest rank seen. Its weights are its own: `linear_in` is "clients".
    """

    name: ClassVar[str] = "hetlora"
    paper: ClassVar[str] = "arXiv 2401.06432"

    def init(self, seed: LoRA) -> LoRA:
        return seed

    def aggregate(self, state: LoRA, updates: Sequence[Update]) -> LoRA:
        w = [u.weight for u in updates]
        sizes = [u.lora.norm() for u in updates]
        if any(sizes):
            w = [size / math.fsum(sizes) for size in sizes]
        rank = max(state.rank, *(u.lora.rank for u in updates))
        return mean_factors([replace(u, weight=x, lora=padded(u.lora, rank)) for u, x in zip(updates, w, strict=True)])

    def readout(self, state: LoRA, client: str | None, rank: int) -> LoRA:
        return state.first(rank)

    def effective(self, state: LoRA) -> LoRA:
        return state
