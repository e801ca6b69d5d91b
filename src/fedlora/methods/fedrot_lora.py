"""FedRot-LoRA: turn each client's factors towards the last average, then average them (2602.23638).

    R_i = argmin over orthogonal R of ||A_i - R A_ref||   (B in the next round: ||B_i R - B_ref||)
    B <- sum_i p_i B_i R_i        A <- sum_i p_i R_i^T A_i

The reference is the pair that the server sent: A and B alternate, and there is no rotation while B is zero. A rotation
changes no update; it only aligns the clients' coordinates. In full, it undoes every orthogonal gauge, and no other.
Not exact. One common rank. In the paper clients rotate before they send; the server has all the data that this takes,
so here the server rotates, and clients stay stock.
rotate_lambda > 1 is the full rotation (or reflection); up to 1 it is a part of the nearest proper
rotation: (1 - l) I + l R, made orthogonal again. Cost: FedIT's and an r x r SVD for each client.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedlora.core.lora import LoRA, revive
from fedlora.core.method import Readout, Roles, Update
from fedlora.errors import HyperparameterError
from fedlora.linalg.weighted_mean import weighted_mean
from fedlora.methods._factors import require_one_rank


@dataclass(frozen=True, eq=False)
class FedRotLoRAState:
    """mean: the averaged pair, and the next round's reference (A in even rounds, B in odd ones)."""

    TAG: ClassVar[str] = "fedrot-lora/1"

    key: int
    round: int
    mean: LoRA


@dataclass(frozen=True)
class FedRotLoRA:
    """Use it as FedIT's closest competitor with the same averages and bytes.

    Args:
        rotate_lambda: how much of the rotation is applied, > 0. Above 1, like the authors' default 1.5, all of R_i; up
            to 1, (1 - l) I + l R_i made orthogonal again, R_i with determinant +1.
    """

    name: ClassVar[str] = "fedrot-lora"
    paper: ClassVar[str] = "arXiv 2602.23638"
    State: ClassVar[type] = FedRotLoRAState

    rotate_lambda: float = 1.5

    def __post_init__(self) -> None:
        if not 0 < self.rotate_lambda < math.inf:
            raise HyperparameterError(f"fedrot-lora: rotate_lambda is positive and finite; got {self.rotate_lambda}.")

    def init(self, seed: LoRA, key: int) -> FedRotLoRAState:
        return FedRotLoRAState(key, 0, seed)

    def roles(self, round: int) -> Roles:
        return Roles()

    def aggregate(self, state: FedRotLoRAState, updates: Sequence[Update]) -> FedRotLoRAState:
        for u in updates:
            require_one_rank("FedRot-LoRA", state.mean.rank, u.client, u.rank)
        p = [u.weight for u in updates]
        turns = [self._rotation(state, u) for u in updates]
        B = weighted_mean([u.B @ R.to(u.B) for u, R in zip(updates, turns, strict=True)], p)
        A = weighted_mean([R.mT.to(u.A) @ u.A for u, R in zip(updates, turns, strict=True)], p)
        return FedRotLoRAState(state.key, state.round + 1, LoRA(B, A))

    def _rotation(self, state: FedRotLoRAState, update: Update) -> Tensor:
        """R (r, r), float64: orthogonal Procrustes against the reference; the identity while B is zero."""
        B, A = (t.double() for t in state.mean.factors)
        one = torch.eye(state.mean.rank, dtype=torch.float64, device=B.device)
        if not bool(B.any()):
            return one
        cross = update.A.double() @ A.mT if state.round % 2 == 0 else update.B.double().mT @ B
        R = _nearest_orthogonal(cross)
        if self.rotate_lambda > 1:
            return R
        if float(torch.linalg.det(R)) < 0:  # no path from I leads to a reflection: take the nearest rotation
            R = _nearest_orthogonal(cross, rotation=True)
        return _nearest_orthogonal((1 - self.rotate_lambda) * one + self.rotate_lambda * R)

    def readout(self, state: FedRotLoRAState, client: str | None, rank: int) -> Readout:
        require_one_rank("FedRot-LoRA", state.mean.rank, client, rank)
        return Readout(revive(state.mean, state.key, state.round, client or ""))

    def effective(self, state: FedRotLoRAState) -> LoRA:
        return state.mean

    def diagnostics(self, state: FedRotLoRAState) -> Mapping[str, object]:
        return {"rank": state.mean.rank, "reference": "A" if state.round % 2 == 0 else "B"}


def _nearest_orthogonal(X: Tensor, *, rotation: bool = False) -> Tensor:
    """U V^T of X = U S V^T; with `rotation`, the nearest with determinant +1."""
    U, _, Vh = torch.linalg.svd(X)
    if rotation and float(torch.linalg.det(U @ Vh)) < 0:
        U = torch.cat([U[:, :-1], -U[:, -1:]], dim=1)
    nearest: Tensor = U @ Vh
    return nearest
