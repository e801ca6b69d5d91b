"""FFA-LoRA: freeze A at one common draw, train and average B only (Sun et al., 2403.12313).

    A = A_0 for ever        B <- sum_i p_i [B_i 0]

Exact, because A is common: sum_i p_i B_i A_0 = (sum_i p_i B_i) A_0. Any ranks: a client of rank r_i has the first r_i
rows of A_0, so zero-padding B_i is exact too. A_0 fixes the gauge: an upload is only B, in A_0's coordinates. Every
update has A_0's row space, which limits expressiveness and needs a larger learning rate. Cost: O(sum r_i d_out); half
of FedIT's bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from fedlora.core.lora import LoRA
from fedlora.core.method import LinearIn, Method, Roles, Update
from fedlora.methods._shared import padded
from fedlora.methods.fedit import mean_factors


@dataclass(frozen=True)
class FFALoRA(Method[LoRA]):
    """Use it if bytes or differential privacy matter: one factor travels, and nothing is quadratic in the noise.

    State: the averaged B and the common A, at the largest rank.
    """

    name: ClassVar[str] = "ffa-lora"
    paper: ClassVar[str] = "arXiv 2403.12313"
    claims: ClassVar[frozenset[str]] = frozenset({"exact", "halves"})
    linear_in: ClassVar[LinearIn] = "factors"

    def roles(self, round: int) -> Roles:
        return Roles(A="frozen")

    def init(self, seed: LoRA) -> LoRA:
        return seed

    def aggregate(self, state: LoRA, updates: Sequence[Update]) -> LoRA:
        B = mean_factors([replace(u, lora=padded(u.lora, state.rank)) for u in updates]).B
        return LoRA(B, state.factors[1].to(B))

    def readout(self, state: LoRA, client: str | None, rank: int) -> LoRA:
        return state.first(rank)

    def effective(self, state: LoRA) -> LoRA:
        return state
