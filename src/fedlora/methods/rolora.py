"""RoLoRA: train and average the two factors in turn, with the other one frozen (Chen et al., 2502.01755).

    even rounds: A frozen, B <- sum_i p_i [B_i 0]
    odd rounds: B frozen, A <- sum_i p_i [A_i; 0]

Exact in every round for any ranks, because the frozen factor is common, which also makes zero-padding exact. The frozen
factor fixes the gauge. Unlike FFA-LoRA it trains both factors, with the same bytes. B comes first: it starts at zero,
so A would have no gradient. Deviations from the authors' code: none in the rule; its ranks are equal. Cost: O(sum r_i
d_out) or O(sum r_i d_in); half of FedIT's bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedlora.core.lora import LoRA, revive
from fedlora.core.method import Readout, Roles, Update
from fedlora.core.summing import FromMeans
from fedlora.methods._slots import first, mean_columns, mean_rows, paired, require_slots


@dataclass(frozen=True, eq=False)
class RoLoRAState:
    """pair: the averaged factor and the frozen one, at the largest rank."""

    key: int
    round: int
    pair: LoRA


@dataclass(frozen=True)
class RoLoRA(FromMeans):
    """Use it if exactness, half the bytes and two trained factors matter more than progress per round."""

    name: ClassVar[str] = "rolora"
    paper: ClassVar[str] = "arXiv 2502.01755"
    State: ClassVar[type] = RoLoRAState

    def init(self, seed: LoRA, key: int) -> RoLoRAState:
        return RoLoRAState(key, 0, revive(seed, key))

    def roles(self, round: int) -> Roles:
        return Roles(A="frozen") if round % 2 == 0 else Roles(B="frozen")

    def aggregate(self, state: RoLoRAState, updates: Sequence[Update]) -> RoLoRAState:
        require_slots("RoLoRA", state.pair.rank, {u.client: u.rank for u in updates})
        (B, A), p = state.pair.factors, [u.weight for u in updates]
        if updates[0].lora.A is None:  # roles give the turn; `state.round` may lag if rounds left this module out
            B = _alive(mean_columns([u.B for u in updates], p, state.pair.rank).mT, B.mT, A).mT
        else:
            A = _alive(mean_rows([u.A for u in updates], p, state.pair.rank), A, B.mT)
        return RoLoRAState(state.key, state.round + 1, paired(B, A))

    def readout(self, state: RoLoRAState, client: str | None, rank: int) -> Readout:
        require_slots("RoLoRA", state.pair.rank, {client or "": rank})
        return Readout(first(state.pair, rank))

    def effective(self, state: RoLoRAState) -> LoRA:
        return state.pair

    def diagnostics(self, state: RoLoRAState) -> Mapping[str, object]:
        return {"rank": state.pair.rank}


def _alive(mean: Tensor, before: Tensor, other: Tensor) -> Tensor:
    """The mean's slots (rows); a slot keeps its old value if the mean's is zero (no client held it) and the other
    factor's is too. The product is zero either way, and the slot stays trainable without a change of the frozen factor.
    """
    dead = (mean == 0).all(dim=1) & (other == 0).all(dim=1)
    return torch.where(dead[:, None], before, mean)
