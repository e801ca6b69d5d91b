"""Zero-padded factor averaging: FedIT for clients of different ranks. For diagnosis and ablations, not advice.

    B <- sum_i p_i [B_i 0]        A <- sum_i p_i [A_i; 0]        read out: the first r_i slots

Many scripts do this, and we read the paper's ablation row "PA off" so. Not exact, not gauge-invariant: slot k of one
client is unrelated to slot k of another. coordinates="subspace" is the row's other reading: it averages (U_i, Ahat_i) =
(U_i, diag(s_i) V_i^T) from the SVD of B_i A_i, with canonical signs but without a common frame. That depends only on
the updates, so it is gauge-invariant, but just as far from their mean. Cost as FedIT; "subspace" adds thin SVDs of each
client's pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from fedlora.core.lora import LoRA, revive
from fedlora.core.method import Readout, Roles, Update
from fedlora.core.summing import FromMeans
from fedlora.errors import HyperparameterError
from fedlora.linalg import svd_of_product
from fedlora.methods._slots import first, mean_columns, mean_rows

Coordinates = Literal["factors", "subspace"]


@dataclass(frozen=True, eq=False)
class PaddedAverageState:
    """mean: the averaged zero-padded pair, at the largest rank seen."""

    key: int
    round: int
    mean: LoRA


@dataclass(frozen=True)
class PaddedAverage(FromMeans):
    """Use it to compare averaging factors with a method that averages updates.

    Args:
        coordinates: what is averaged: the "factors" (B_i, A_i) as sent, or each update's own "subspace" form
            (U_i, diag(s_i) V_i^T) from its SVD.
    """

    name: ClassVar[str] = "padded-average"
    paper: ClassVar[str] = "GLoRA, ablation of the core designs, row PA off (our reading)"
    State: ClassVar[type] = PaddedAverageState

    coordinates: Coordinates = "factors"

    def __post_init__(self) -> None:
        if self.coordinates not in get_args(Coordinates):
            raise HyperparameterError(
                f"padded-average: coordinates is one of {get_args(Coordinates)}; got {self.coordinates!r}."
            )

    def init(self, seed: LoRA, key: int) -> PaddedAverageState:
        return PaddedAverageState(key, 0, seed)

    def roles(self, round: int) -> Roles:
        return Roles()

    def aggregate(self, state: PaddedAverageState, updates: Sequence[Update]) -> PaddedAverageState:
        p = [u.weight for u in updates]
        pairs = [(u.B, u.A) if self.coordinates == "factors" else _subspace(u) for u in updates]
        rank = max(state.mean.rank, *(u.lora.rank for u in updates))
        mean = LoRA(mean_columns([B for B, _ in pairs], p, rank), mean_rows([A for _, A in pairs], p, rank))
        mean = mean.map(lambda t: t.to(updates[0].B))
        return PaddedAverageState(state.key, state.round + 1, mean)

    def require_means(self) -> None:
        """Raises `HyperparameterError` for "subspace", because each client has its own."""
        if self.coordinates != "factors":
            raise HyperparameterError(
                f"padded-average: coordinates = {self.coordinates!r} needs each client's update; set no memory, or "
                f"coordinates = 'factors'."
            )

    def readout(self, state: PaddedAverageState, client: str | None, rank: int) -> Readout:
        return Readout(revive(first(state.mean, rank), state.key, state.round, client or ""))

    def effective(self, state: PaddedAverageState) -> LoRA:
        return state.mean

    def diagnostics(self, state: PaddedAverageState) -> Mapping[str, object]:
        return {"rank": state.mean.rank}


def _subspace(update: Update) -> tuple[Tensor, Tensor]:
    spectrum = svd_of_product(update.B, update.A, tolerance=0.0, dtype=torch.float64)
    return spectrum.U, spectrum.s[:, None] * spectrum.Vh
