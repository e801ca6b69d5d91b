"""FLoRA: stack the factors, add the exact mean to the base weight, start afresh (Wang et al., 2409.05976).

    W0 <- W0 + [p_1 B_1 | p_2 B_2 | ...] [A_1; A_2; ...]        every client starts the round as LoRA starts: B = 0

Exact and gauge-invariant: only products are used. Any ranks. The base weight changes in every round, so only the whole
history of stacks is the model, and a client that was away gets everything that it missed (`BaseChange`). alpha / r is
folded into each B_i, and each round's stack is recompressed to its rank. Cost: a thin SVD of sum r_i columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedlora.core.base_change import BaseChange, moved
from fedlora.core.lora import LoRA
from fedlora.core.method import LinearIn, Method, Update
from fedlora.linalg import svd_of_product
from fedlora.methods._shared import mean_products


@dataclass(frozen=True, eq=False)
class FLoRAState:
    """moved: all rounds' means, W0 -> W0 + moved; None: none yet. empty: a pair of no slots."""

    moved: BaseChange | None
    empty: LoRA


@dataclass(frozen=True)
class FLoRA(Method[FLoRAState]):
    """Use it if clients can accept changes of the base weight, traffic is cheap, and each round should start afresh."""

    name: ClassVar[str] = "flora"
    paper: ClassVar[str] = "arXiv 2409.05976"
    State: ClassVar[type] = FLoRAState
    claims: ClassVar[frozenset[str]] = frozenset({"exact", "gauge", "readouts", "halves"})
    linear_in: ClassVar[LinearIn] = "products"

    def init(self, seed: LoRA) -> FLoRAState:
        return FLoRAState(
            moved(None, svd_of_product(*seed.map(Tensor.double).factors), seed.factors[0].dtype), seed.first(0)
        )

    def aggregate(self, state: FLoRAState, updates: Sequence[Update]) -> FLoRAState:
        return FLoRA.aggregate_all(self, [state], [updates])[0]

    def aggregate_all(self, states: Sequence[FLoRAState], updates: Sequence[Sequence[Update]]) -> list[FLoRAState]:
        means, empty = mean_products(updates, torch.float64), [sent[0].lora.first(0) for sent in updates]
        return [
            FLoRAState(moved(state.moved, mean, none.factors[0].dtype), none)
            for state, mean, none in zip(states, means, empty, strict=True)
        ]

    def readout(self, state: FLoRAState, client: str | None, rank: int) -> LoRA:
        return state.empty  # the server fills every slot, as LoRA itself starts

    def effective(self, state: FLoRAState) -> LoRA:
        return state.empty if state.moved is None else state.moved.total.map(lambda t: t.to(state.empty.factors[0]))

    def base(self, state: FLoRAState) -> BaseChange | None:
        return state.moved

    def diagnostics(self, state: FLoRAState) -> Mapping[str, object]:
        return {"rank": state.moved.total.rank if state.moved else 0}
