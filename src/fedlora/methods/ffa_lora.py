"""FFA-LoRA: freeze A at one common draw, train and average B only (Sun et al., 2403.12313).

    A = A_0 for ever        B <- sum_i p_i [B_i 0]

Exact, because A is common: sum_i p_i B_i A_0 = (sum_i p_i B_i) A_0. Any ranks: a client of rank r_i has the first r_i
rows of A_0, so zero-padding B_i is exact too. A_0 fixes the gauge: an upload is only B, in A_0's coordinates. Every
update has A_0's row space, which limits expressiveness and needs a larger learning rate. Heads are shared.
Deviations from the public code: weights p_i instead of a uniform mean. Cost: O(sum r_i d_out); half of FedIT's bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedlora.core.accumulating import Accumulating
from fedlora.core.lora import LoRA, revive
from fedlora.core.method import Readout, Roles, Update
from fedlora.core.summing import FromMeans
from fedlora.errors import HyperparameterError
from fedlora.linalg.basics import norm
from fedlora.methods._slots import first, mean_columns, paired, require_slots


@dataclass(frozen=True, eq=False)
class FFALoRAState:
    """pair: the averaged B and the common A, at the largest rank."""

    key: int
    round: int
    pair: LoRA


@dataclass(frozen=True)
class FFALoRA(Accumulating[FFALoRAState], FromMeans):
    """Use it if bytes or differential privacy matter: one factor travels, and nothing is quadratic in the noise."""

    name: ClassVar[str] = "ffa-lora"
    paper: ClassVar[str] = "arXiv 2403.12313"
    State: ClassVar[type] = FFALoRAState

    def init(self, seed: LoRA, key: int) -> FFALoRAState:
        return FFALoRAState(key, 0, revive(seed, key))

    def roles(self, round: int) -> Roles:
        return Roles(A="frozen")

    def aggregate(self, state: FFALoRAState, updates: Sequence[Update]) -> FFALoRAState:
        require_slots("FFA-LoRA", state.pair.rank, {u.client: u.rank for u in updates})
        _, A = state.pair.factors
        B = mean_columns([u.B for u in updates], [u.weight for u in updates], state.pair.rank)
        return FFALoRAState(state.key, state.round + 1, paired(B, A))

    def require_accumulating(self) -> None:
        """It has no options. A is frozen and public, so a change of B is a change of the product."""

    def common_rows(self, state: FFALoRAState) -> Tensor:
        return state.pair.factors[1]

    def accumulated(self, state: FFALoRAState, change: LoRA, rank: int) -> FFALoRAState:
        """B plus the change in A's coordinates. It already has A's rank, so `rank` cuts nothing."""
        B, A = state.pair.factors
        Y, X = (t.double() for t in change.factors)
        rows = A.double()
        coordinates = torch.linalg.lstsq(rows.mH, X.mH).solution.mH  # X = coordinates A: A's row space holds X's rows
        lost, size = float(norm(X - coordinates @ rows)), float(norm(X))
        if lost > 1e-6 * size:
            raise HyperparameterError(
                f"ffa-lora: the change has rows outside the common frozen A, by {lost / size:.1e} of their size, so no "
                f"B can represent them. Project it on `common_rows`."
            )
        moved = (B.double() + Y @ coordinates).to(B)
        return FFALoRAState(state.key, state.round + 1, paired(moved, A))

    def readout(self, state: FFALoRAState, client: str | None, rank: int) -> Readout:
        require_slots("FFA-LoRA", state.pair.rank, {client or "": rank})
        return Readout(first(state.pair, rank))

    def effective(self, state: FFALoRAState) -> LoRA:
        return state.pair

    def diagnostics(self, state: FFALoRAState) -> Mapping[str, object]:
        return {"rank": state.pair.rank}
