"""FedIT: average each factor by itself (Zhang et al., "Towards Building the Federated GPT", 2305.05644).

    B <- sum_i p_i B_i        A <- sum_i p_i A_i

Not exact: (sum p_i B_i)(sum p_i A_i) contains cross terms B_i A_j. Not gauge-invariant: (B_i Q, Q^-1 A_i) instead of
(B_i, A_i) changes the result. One common rank. Cost: O(sum r_i (d_out + d_in)), one pass over the factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedlora.core.lora import LoRA
from fedlora.core.method import LinearIn, Method, Update
from fedlora.linalg import weighted_mean


@dataclass(frozen=True)
class FedIT(Method[LoRA]):
    """Use it as the plain baseline, with one rank for all clients. State: the averaged pair."""

    name: ClassVar[str] = "fedit"
    paper: ClassVar[str] = "arXiv 2305.05644"
    one_rank: ClassVar[bool] = True
    claims: ClassVar[frozenset[str]] = frozenset({"halves"})
    linear_in: ClassVar[LinearIn] = "factors"

    def init(self, seed: LoRA) -> LoRA:
        return seed

    def aggregate(self, state: LoRA, updates: Sequence[Update]) -> LoRA:
        return mean_factors(updates)

    def readout(self, state: LoRA, client: str | None, rank: int) -> LoRA:
        return state

    def effective(self, state: LoRA) -> LoRA:
        return state


def mean_factors(updates: Sequence[Update]) -> LoRA:
    """The weighted mean of each factor that travelled, B (d_out, r) and A (r, d_in), all of one rank. The other methods
    that average factors call it, too."""
    weights = [u.weight for u in updates]
    sent = [u.lora.tensors() for u in updates]
    means = {name: weighted_mean([tensors[name] for tensors in sent], weights) for name in sent[0]}
    return LoRA(means.get("B"), means.get("A"))
