"""FLoRA: stack the factors, add the exact mean to the base weight, start afresh (Wang et al., 2409.05976).

    W0 <- W0 + [p_1 B_1 | p_2 B_2 | ...] [A_1; A_2; ...]        every client starts the round as LoRA starts: B = 0

Exact and gauge-invariant: only products are used. Any ranks. The base weight changes in every round, so only the whole
history of stacks is the model, and a client that was away gets everything that it missed (`BaseChange`). Deviations
from the authors' code: alpha / r is folded into each B_i (theirs is right only for one common alpha / r), and stacks
are recompressed exactly to their rank. Each client and round gets a new draw of A, as theirs; ours is the server's.
Cost: thin SVDs of stacks of sum r_i and of rank(base) + sum r_i columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedlora.core.base_change import BaseChange, moved
from fedlora.core.lora import LoRA, fresh_rows, revive
from fedlora.core.method import Readout, Roles, Update
from fedlora.core.multiplied import How, TakesMultipliers
from fedlora.methods._spectral import mean_pair, rounding_share


@dataclass(frozen=True, eq=False)
class FLoRAState:
    """base: all rounds' means, W0 -> W0 + base; None if there are none. start: the common start's rows of A. rounding:
    the share of the last mean's energy that rounding of the uploads could make up."""

    key: int
    round: int
    base: BaseChange | None
    start: Tensor
    d_out: int
    rounding: float = 0.0


@dataclass(frozen=True)
class FLoRA(TakesMultipliers):
    """Use it if clients can accept changes of the base weight, traffic is cheap, and each round should start afresh."""

    name: ClassVar[str] = "flora"
    paper: ClassVar[str] = "arXiv 2409.05976"
    State: ClassVar[type] = FLoRAState

    def init(self, seed: LoRA, key: int) -> FLoRAState:
        B, A = seed.factors
        return FLoRAState(key, 0, moved(None, seed), A, B.shape[0])

    def roles(self, round: int) -> Roles:
        return Roles(moves_base=True)

    @property
    def multiplied(self) -> How:
        """Only products are used, of any rank."""
        return "products"

    def aggregate(self, state: FLoRAState, updates: Sequence[Update]) -> FLoRAState:
        mean = mean_pair(updates)
        base = moved(state.base, mean, updates[0].B.dtype)
        return FLoRAState(state.key, state.round + 1, base, state.start, state.d_out, rounding_share(updates, mean))

    def readout(self, state: FLoRAState, client: str | None, rank: int) -> Readout:
        A = state.start[:rank]
        if state.round > 0 or len(A) < rank:
            A = fresh_rows(rank, A.shape[1], state.key, state.round, client or "", like=A)
        fresh = LoRA(A.new_zeros(state.d_out, rank), A)
        return Readout(revive(fresh, state.key, state.round, client or ""), base=state.base)

    def effective(self, state: FLoRAState) -> LoRA:
        if state.base is not None:
            like = state.base.steps[-1].factors[0] if state.base.steps else state.start
            return state.base.total.map(lambda t: t.to(like.dtype))
        return LoRA(state.start.new_zeros(state.d_out, 1), torch.zeros_like(state.start[:1]))

    def diagnostics(self, state: FLoRAState) -> Mapping[str, object]:
        return {"rank": state.base.total.rank if state.base else 0, "rounding": state.rounding}
