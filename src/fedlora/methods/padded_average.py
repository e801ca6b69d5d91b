"""Zero-padded factor averaging: FedIT for clients of different ranks. For diagnosis and ablations, not advice.

    B <- sum_i p_i [B_i 0]        A <- sum_i p_i [A_i; 0]        read out: the first r_i slots

Many scripts do this, and we read the paper's ablation row "PA off" so. Not exact, not gauge-invariant: slot k of one
client is unrelated to slot k of another. coordinates="subspace" is the row's other reading: it averages (U_i, Ahat_i) =
(U_i, diag(s_i) V_i^T) from the SVD of B_i A_i, with canonical signs but without a common frame. That depends only on
the updates, so it is gauge-invariant, but just as far from their mean. Cost as FedIT; "subspace" adds thin SVDs of each
client's pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

from torch import Tensor

from fedlora.core.lora import LoRA
from fedlora.core.method import LinearIn, Method, Update
from fedlora.errors import HyperparameterError
from fedlora.methods._shared import mean_product, padded
from fedlora.methods.fedit import mean_factors

Coordinates = Literal["factors", "subspace"]


@dataclass(frozen=True)
class PaddedAverage(Method[LoRA]):
    """Use it to compare averaging factors with a method that averages updates.

    State: the averaged zero-padded pair, at the largest rank seen.

    Args:
        coordinates: what is averaged: the "factors" (B_i, A_i) as sent, or each update's own "subspace" form
            (U_i, diag(s_i) V_i^T) from its SVD.
    """

    name: ClassVar[str] = "padded-average"
    paper: ClassVar[str] = "GLoRA, ablation of the core designs, row PA off (our reading)"

    coordinates: Coordinates = "factors"

    def __post_init__(self) -> None:
        if self.coordinates not in get_args(Coordinates):
            raise HyperparameterError(
                f"padded-average: coordinates is one of {get_args(Coordinates)}; got {self.coordinates!r}."
            )

    @property
    def claims(self) -> frozenset[str]:
        return frozenset({"halves"} if self.coordinates == "factors" else {"gauge", "readouts", "halves"})

    @property
    def linear_in(self) -> LinearIn:
        """Each client's subspace form is no function of sums."""
        return "factors" if self.coordinates == "factors" else "clients"

    def init(self, seed: LoRA) -> LoRA:
        return seed

    def aggregate(self, state: LoRA, updates: Sequence[Update]) -> LoRA:
        rank = max(state.rank, *(u.lora.rank for u in updates))
        sent = updates if self.coordinates == "factors" else [_in_its_subspace(u) for u in updates]
        dtype = updates[0].lora.factors[0].dtype
        return mean_factors([replace(u, lora=padded(u.lora, rank)) for u in sent]).map(lambda t: t.to(dtype))

    def readout(self, state: LoRA, client: str | None, rank: int) -> LoRA:
        return state.first(rank)

    def effective(self, state: LoRA) -> LoRA:
        return state


def _in_its_subspace(update: Update) -> Update:
    """The same update as (U_i, diag(s_i) V_i^T), in float64."""
    alone = replace(update, weight=1.0, lora=update.lora.map(Tensor.double))
    own = mean_product([alone])
    return replace(update, lora=LoRA(own.U, own.s[:, None] * own.Vh))
