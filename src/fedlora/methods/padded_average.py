"""Zero-padded factor averaging: FedIT for clients of different ranks. A diagnostic and an ablation row, not advice.

    B <- sum_i p_i [B_i 0]        A <- sum_i p_i [A_i; 0]        read out: the first r_i slots

What many scripts do, and our reading of the paper's ablation row "PA off". Not exact, not gauge-invariant:
slot k of one client has nothing to do with slot k of another. Cost as FedIT.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import pad

from fedlora.lora import LoRA, revive
from fedlora.method import Readout, Roles, Update
from fedlora.methods.factors import weighted_mean


@dataclass(frozen=True, eq=False)
class PaddedAverageState:
    """mean: the averaged zero-padded pair, of the largest rank seen."""

    key: int
    round: int
    mean: LoRA


@dataclass(frozen=True)
class PaddedAverage:
    """Use it to see what averaging factors does, next to a method that averages updates."""

    name: ClassVar[str] = "padded-average"
    paper: ClassVar[str] = "GLoRA, ablation of the core designs, row PA off (our reading)"
    State: ClassVar[type] = PaddedAverageState

    def init(self, seed: LoRA, key: int) -> PaddedAverageState:
        return PaddedAverageState(key, 0, seed)

    def roles(self, state: PaddedAverageState) -> Roles:
        return Roles()

    def aggregate(self, state: PaddedAverageState, updates: Sequence[Update]) -> PaddedAverageState:
        p = [u.weight for u in updates]
        rank = max(state.mean.rank, *(u.lora.rank for u in updates))
        B = weighted_mean([_columns(u.B, rank) for u in updates], p)
        A = weighted_mean([_rows(u.A, rank) for u in updates], p)
        return PaddedAverageState(state.key, state.round + 1, LoRA(B, A))

    def readout(self, state: PaddedAverageState, client: str | None, rank: int) -> Readout:
        B, A = state.mean.factors
        lora = LoRA(_columns(B[:, :rank], rank), _rows(A[:rank], rank))
        return Readout(revive(lora, state.key, state.round, client or ""))

    def effective(self, state: PaddedAverageState) -> LoRA:
        return state.mean

    def diagnostics(self, state: PaddedAverageState) -> Mapping[str, object]:
        return {"rank": state.mean.rank}


def _columns(B: Tensor, rank: int) -> Tensor:
    return pad(B, (0, rank - B.shape[1]))


def _rows(A: Tensor, rank: int) -> Tensor:
    return pad(A, (0, 0, 0, rank - A.shape[0]))
