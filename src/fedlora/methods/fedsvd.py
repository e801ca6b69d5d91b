"""FedSVD: clients train B; the server takes the mean update's SVD and sends an orthonormal A (2505.12805).

    Delta W = (sum_i p_i [B_i 0]) A = U S V^T        next round: B = U S,  A = V^T, frozen at the clients

Exact, because A is common to the round: sum_i p_i B_i A = (sum_i p_i B_i) A, for any ranks up to A's (a client of rank
r_i has the first r_i rows, which hold the strongest directions). Unlike FFA-LoRA's, A follows what was learned, but its
row space stays that of the first draw. A fixes the gauge: an upload is B_i in A's coordinates. A is orthonormal from
the second round on, so noise or clipping on B acts equally on the update. Cost: O(sum r_i d_out + r^2 (d_out + d_in));
up as FFA-LoRA, half of FedIT's bytes; down B and the new A, as FedIT.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch.nn.functional import pad

from fedlora.core.lora import LoRA
from fedlora.core.method import LinearIn, Method, Roles, Update
from fedlora.methods._shared import padded
from fedlora.methods.fedit import mean_factors


@dataclass(frozen=True)
class FedSVD(Method[LoRA]):
    """Use it like FFA-LoRA, if a frozen random A is too narrow and the downlink can carry a new one each round.

    State: the start; later B = U S (d_out, r) and A = V^T (r, d_in), whose rows are orthonormal.
    """

    name: ClassVar[str] = "fedsvd"
    paper: ClassVar[str] = "arXiv 2505.12805"
    claims: ClassVar[frozenset[str]] = frozenset({"exact", "halves"})
    linear_in: ClassVar[LinearIn] = "factors"

    def roles(self, round: int) -> Roles:
        return Roles(A="frozen")

    def init(self, seed: LoRA) -> LoRA:
        return seed

    def aggregate(self, state: LoRA, updates: Sequence[Update]) -> LoRA:
        B = mean_factors([replace(u, lora=padded(u.lora, state.rank)) for u in updates]).B
        return reparameterised(LoRA(B, state.factors[1].to(B)))

    def readout(self, state: LoRA, client: str | None, rank: int) -> LoRA:
        return state.first(rank)

    def effective(self, state: LoRA) -> LoRA:
        return state


def reparameterised(lora: LoRA) -> LoRA:
    """The same update as (U S, V^T), strongest first, computed in float64. The rows of V^T are orthonormal, even where
    S is zero, and lie in A's row space; the entry of largest magnitude of each is positive."""
    B, A = (t.double() for t in lora.factors)
    W, R = torch.linalg.qr(A.mT)
    core = B @ R.mT  # (d_out, m) in coordinates of W (d_in, m), m = min(r, d_in)
    # With zero rows below it is tall, and then has as many right singular vectors as W has columns.
    tall = torch.cat([core, core.new_zeros(max(0, core.shape[1] - len(core)), core.shape[1])])
    V = torch.linalg.svd(tall, full_matrices=False)[2]
    rows = V @ W.mT
    sign = torch.where(rows.amax(dim=1) >= -rows.amin(dim=1), 1.0, -1.0).to(rows)[:, None]
    empty = lora.rank - len(rows)  # slots beyond d_in: B = 0 and the rows as they were, so that they can be trained
    made = LoRA(pad(core @ (sign * V).mT, (0, empty)), torch.cat([sign * rows, A[len(rows) :]]))
    return made.map(lambda t: t.to(lora.factors[0]))
