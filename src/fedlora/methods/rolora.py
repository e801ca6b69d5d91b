"""RoLoRA: train and average the two factors in turn, with the other one frozen (Chen et al., 2502.01755).

    even rounds: A frozen, B <- sum_i p_i [B_i 0]
    odd rounds: B frozen, A <- sum_i p_i [A_i; 0]

Exact in every round for any ranks, because the frozen factor is common, which also makes zero-padding exact. The frozen
factor fixes the gauge. Unlike FFA-LoRA it trains both factors, with the same bytes. B comes first: it starts at zero,
so A would have no gradient. Cost: O(sum r_i d_out) or O(sum r_i d_in); half of FedIT's bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedlora.core.lora import LoRA
from fedlora.core.method import LinearIn, Method, Roles, Update
from fedlora.methods._shared import padded
from fedlora.methods.fedit import mean_factors


@dataclass(frozen=True)
class RoLoRA(Method[LoRA]):
    """Use it if exactness, half the bytes and two trained factors matter more than progress per round.

    State: the averaged factor and the frozen one, at the largest rank.
    """

    name: ClassVar[str] = "rolora"
    paper: ClassVar[str] = "arXiv 2502.01755"
    claims: ClassVar[frozenset[str]] = frozenset({"exact", "halves"})
    linear_in: ClassVar[LinearIn] = "factors"

    def roles(self, round: int) -> Roles:
        return Roles(A="frozen") if round % 2 == 0 else Roles(B="frozen")

    def init(self, seed: LoRA) -> LoRA:
        return seed

    def aggregate(self, state: LoRA, updates: Sequence[Update]) -> LoRA:
        (B, A), mean = state.factors, mean_factors([replace(u, lora=padded(u.lora, state.rank)) for u in updates])
        if mean.B is not None:  # the factor that came says whose turn it was
            return LoRA(_alive(mean.B.mT, B.mT, A).mT, A.to(mean.B))
        return LoRA(B.to(mean.A), _alive(mean.A, A, B.mT))

    def readout(self, state: LoRA, client: str | None, rank: int) -> LoRA:
        return state.first(rank)

    def effective(self, state: LoRA) -> LoRA:
        return state


def _alive(mean: Tensor | None, before: Tensor, other: Tensor) -> Tensor:
    """The mean's slots (rows); a slot keeps its old value if the mean's is zero (no client held it) and the other
    factor's is too. The product is zero either way, and the slot stays trainable without a change of the frozen factor.
    """
    assert mean is not None  # one of the factors travelled
    dead = (mean == 0).all(dim=1) & (other == 0).all(dim=1)
    return torch.where(dead[:, None], before.to(mean), mean)
