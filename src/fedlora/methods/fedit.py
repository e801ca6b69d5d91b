"""FedIT: average each factor by itself (Zhang et al., "Towards Building the Federated GPT", 2305.05644).

    B <- sum_i p_i B_i        A <- sum_i p_i A_i

Not exact: (sum p_i B_i)(sum p_i A_i) contains cross terms B_i A_j. Not gauge-invariant: writing one client's update as
(B_i Q, Q^-1 A_i) changes the result. One common rank. Deviations from the Shepherd code: none in the rule.
Cost: O(sum r_i (d_out + d_in)), one pass over the factors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedlora.core.lora import LoRA, revive
from fedlora.core.method import Readout, Roles, Update
from fedlora.core.summing import FromMeans
from fedlora.linalg.weighted_mean import weighted_mean
from fedlora.methods._factors import require_one_rank


@dataclass(frozen=True, eq=False)
class FedITState:
    """mean: the averaged pair, B (d_out, r) and A (r, d_in)."""

    TAG: ClassVar[str] = "fedit/1"

    key: int
    round: int
    mean: LoRA


@dataclass(frozen=True)
class FedIT(FromMeans):
    """Use it as the plain baseline, with one rank for all clients."""

    name: ClassVar[str] = "fedit"
    paper: ClassVar[str] = "arXiv 2305.05644"
    State: ClassVar[type] = FedITState

    def init(self, seed: LoRA, key: int) -> FedITState:
        return FedITState(key, 0, seed)

    def roles(self, round: int) -> Roles:
        return Roles()

    def aggregate(self, state: FedITState, updates: Sequence[Update]) -> FedITState:
        for u in updates:
            require_one_rank("FedIT", state.mean.rank, u.client, u.rank)
        p = [u.weight for u in updates]
        mean = LoRA(weighted_mean([u.B for u in updates], p), weighted_mean([u.A for u in updates], p))
        return FedITState(state.key, state.round + 1, mean)

    def readout(self, state: FedITState, client: str | None, rank: int) -> Readout:
        require_one_rank("FedIT", state.mean.rank, client, rank)
        return Readout(revive(state.mean, state.key, state.round, client or ""))

    def effective(self, state: FedITState) -> LoRA:
        return state.mean

    def diagnostics(self, state: FedITState) -> Mapping[str, object]:
        return {"rank": state.mean.rank}
