"""FedSA-LoRA: share A, keep B (Guo et al., "Selective Aggregation for Low-Rank Adaptation", 2410.01463).

    A <- sum_i p_i A_i        B_i never leaves client i

There is no global model: client i's is W0 + B_i A, and what to evaluate must be named
(docs/reference/methods.md#fedsa-lora). Neither exact nor gauge-invariant, by design. One common rank. Heads stay local
too, as in the authors' GLUE configuration. Cost: O(sum r_i d_in); half of FedIT's bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedlora.core.lora import LoRA
from fedlora.core.method import LinearIn, Method, Roles, Update
from fedlora.methods.fedit import mean_factors


@dataclass(frozen=True)
class FedSALoRA(Method[LoRA]):
    """Use it for personalised clients that need no common model, with one rank for all. State: the mean A alone."""

    name: ClassVar[str] = "fedsa-lora"
    paper: ClassVar[str] = "arXiv 2410.01463"
    one_rank: ClassVar[bool] = True
    linear_in: ClassVar[LinearIn] = "factors"

    def roles(self, round: int) -> Roles:
        return Roles(B="local", heads="local")

    def init(self, seed: LoRA) -> LoRA:
        return LoRA(None, seed.A)

    def aggregate(self, state: LoRA, updates: Sequence[Update]) -> LoRA:
        return mean_factors(updates)

    def readout(self, state: LoRA, client: str | None, rank: int) -> LoRA:
        return state

    def effective(self, state: LoRA) -> None:
        return None
