"""FedSVD: clients train B; the server takes the mean update's SVD and sends an orthonormal A (2505.12805).

    Delta W = (sum_i p_i [B_i 0]) A = U S V^T        next round: B = U S,  A = V^T, frozen at the clients

Exact, because A is common to the round: sum_i p_i B_i A = (sum_i p_i B_i) A, for any ranks up to A's (a client of rank
r_i has the first r_i rows, which hold the strongest directions). Unlike FFA-LoRA's, A follows what was learned, but its
row space stays that of the first draw. A fixes the gauge: an upload is B_i in A's coordinates. A is orthonormal from
the second round on, so noise or clipping on B acts equally on the update. Deviations from the paper: weights p_i
instead of a uniform mean, no privacy mechanism, and mixed ranks, which are ours. Cost: O(sum r_i d_out + r^2 (d_out +
d_in)); up as FFA-LoRA, half of FedIT's bytes; down B and the new A, as FedIT.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedlora.core.lora import LoRA, revive
from fedlora.core.method import Readout, Roles, Update
from fedlora.core.summing import FromMeans
from fedlora.methods._slots import columns, first, mean_columns, require_slots


@dataclass(frozen=True, eq=False)
class FedSVDState:
    """pair: the start; later B = U S (d_out, r) and A = V^T (r, d_in), whose rows are orthonormal."""

    key: int
    round: int
    pair: LoRA


@dataclass(frozen=True)
class FedSVD(FromMeans):
    """Use it like FFA-LoRA, if a frozen random A is too narrow and the downlink can carry a new one each round."""

    name: ClassVar[str] = "fedsvd"
    paper: ClassVar[str] = "arXiv 2505.12805"
    State: ClassVar[type] = FedSVDState

    def init(self, seed: LoRA, key: int) -> FedSVDState:
        return FedSVDState(key, 0, revive(seed, key))

    def roles(self, round: int) -> Roles:
        return Roles(A="frozen")

    def aggregate(self, state: FedSVDState, updates: Sequence[Update]) -> FedSVDState:
        require_slots("FedSVD", state.pair.rank, {u.client: u.rank for u in updates})
        B = mean_columns([u.B for u in updates], [u.weight for u in updates], state.pair.rank)
        made = reparameterised(LoRA(B, state.pair.factors[1].to(B)))
        return FedSVDState(state.key, state.round + 1, revive(made, state.key, state.round + 1))

    def readout(self, state: FedSVDState, client: str | None, rank: int) -> Readout:
        require_slots("FedSVD", state.pair.rank, {client or "": rank})
        return Readout(first(state.pair, rank))

    def effective(self, state: FedSVDState) -> LoRA:
        return state.pair

    def diagnostics(self, state: FedSVDState) -> Mapping[str, object]:
        sizes = torch.linalg.vector_norm(state.pair.factors[0].double(), dim=0)
        return {"rank": int((sizes > 0).sum()), "singular_values": sizes.tolist()}


def reparameterised(lora: LoRA) -> LoRA:
    """The same update as (U S, V^T), strongest first, in B's dtype, computed in float64. Every row of V^T is
    orthonormal, even if S is zero there, within A's row space, and its largest entry is positive."""
    B, A = (t.double() for t in lora.factors)
    W, R = torch.linalg.qr(A.mT)
    core = columns(B @ R.mT, W.shape[1])
    tall = torch.cat([core, core.new_zeros(max(0, W.shape[1] - len(core)), W.shape[1])])
    V = torch.linalg.svd(tall, full_matrices=False)[2]  # W.shape[1] rows, whatever the rank
    rows = V @ W.mT
    sign = torch.where(rows.amax(dim=1) >= -rows.amin(dim=1), 1.0, -1.0).to(rows)[:, None]
    out = (t.to(lora.factors[0].dtype) for t in (core @ (sign * V).mT, sign * rows))
    return first(LoRA(*out), lora.rank)
