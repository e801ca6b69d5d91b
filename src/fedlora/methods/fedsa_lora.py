"""FedSA-LoRA: share A, keep B (Guo et al., "Selective Aggregation for Low-Rank Adaptation", 2410.01463).

    A <- sum_i p_i A_i        B_i never leaves client i

There is no global model: a client's model is W0 + B_i A, and what to evaluate must be named
(docs/reference/methods.md#fedsa-lora). Not exact and not gauge-invariant by design. One common rank. Heads stay local
too, as in the authors' GLUE configuration (`Server(..., heads="average")` overrides). Cost: O(sum r_i d_in); half of
FedIT's bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedlora.core.lora import LoRA, revive
from fedlora.core.method import Readout, Roles, Update
from fedlora.core.summing import FromMeans
from fedlora.linalg.weighted_mean import weighted_mean
from fedlora.methods._factors import require_one_rank


@dataclass(frozen=True, eq=False)
class FedSALoRAState:
    """A: (r, d_in), the shared average."""

    TAG: ClassVar[str] = "fedsa-lora/1"

    key: int
    round: int
    A: Tensor


@dataclass(frozen=True)
class FedSALoRA(FromMeans):
    """Use it for personalised clients that need no common model, with one rank for all."""

    name: ClassVar[str] = "fedsa-lora"
    paper: ClassVar[str] = "arXiv 2410.01463"
    State: ClassVar[type] = FedSALoRAState

    def init(self, seed: LoRA, key: int) -> FedSALoRAState:
        _, A = revive(seed, key).factors
        return FedSALoRAState(key, 0, A)

    def roles(self, round: int) -> Roles:
        return Roles(B="local", heads="local")

    def aggregate(self, state: FedSALoRAState, updates: Sequence[Update]) -> FedSALoRAState:
        for u in updates:
            require_one_rank("FedSA-LoRA", len(state.A), u.client, u.rank)
        A = weighted_mean([u.A for u in updates], [u.weight for u in updates])
        return FedSALoRAState(state.key, state.round + 1, A)

    def readout(self, state: FedSALoRAState, client: str | None, rank: int) -> Readout:
        require_one_rank("FedSA-LoRA", len(state.A), client, rank)
        return Readout(LoRA(None, state.A))

    def effective(self, state: FedSALoRAState) -> None:
        return None

    def diagnostics(self, state: FedSALoRAState) -> Mapping[str, object]:
        return {"rank": len(state.A)}
