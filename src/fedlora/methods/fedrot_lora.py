"""FedRot-LoRA: turn each client's factors towards the last average, then average them (2602.23638, ICML 2026).

    R_i = argmin over orthogonal R of ||A_i - R A_ref||     in odd rounds, counted from 0 as in the authors' code
    R_i = argmin over orthogonal R of ||B_i R - B_ref||     in even rounds
    B <- sum_i p_i B_i R_i        A <- sum_i p_i R_i^T A_i

The reference is the pair that the server sent; nothing turns while its B is zero, so that the first turn is by A. A
rotation changes no update; it only aligns the clients' coordinates. In full, it undoes every orthogonal gauge, and no
other. Not exact. One common rank. In the paper clients rotate before they send; the server has all the data that this
takes, so here the server rotates, and clients stay stock. Cost: FedIT's and an r x r SVD for each client.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedlora.core.lora import LoRA
from fedlora.core.method import Method, Update
from fedlora.errors import HyperparameterError
from fedlora.methods.fedit import mean_factors


@dataclass(frozen=True, eq=False)
class FedRotLoRAState:
    """mean: the averaged pair, and the next round's reference. rounds: how many made it."""

    mean: LoRA
    rounds: int


@dataclass(frozen=True)
class FedRotLoRA(Method[FedRotLoRAState]):
    """Use it as FedIT's closest competitor with the same averages and bytes.

    Args:
        rotate_lambda: how much of the rotation is applied, > 0. Above 1, like the authors' default, all of R_i, which
            may be a reflection; up to 1, (1 - l) I + l R_i made orthogonal again, R_i the nearest rotation. The paper
            finds 0.4 to 0.6 best.
    """

    name: ClassVar[str] = "fedrot-lora"
    paper: ClassVar[str] = "arXiv 2602.23638"
    State: ClassVar[type] = FedRotLoRAState
    one_rank: ClassVar[bool] = True
    claims: ClassVar[frozenset[str]] = frozenset({"halves"})

    rotate_lambda: float = 1.5

    def __post_init__(self) -> None:
        if not 0 < self.rotate_lambda < math.inf:
            raise HyperparameterError(f"fedrot-lora: rotate_lambda is positive and finite; got {self.rotate_lambda}.")

    def init(self, seed: LoRA) -> FedRotLoRAState:
        return FedRotLoRAState(seed, 0)

    def aggregate(self, state: FedRotLoRAState, updates: Sequence[Update]) -> FedRotLoRAState:
        like = updates[0].lora.factors[0]
        turned = mean_factors([replace(u, lora=self._turned(state, u.lora.map(Tensor.double))) for u in updates])
        return FedRotLoRAState(turned.map(lambda t: t.to(like)), state.rounds + 1)

    def _turned(self, state: FedRotLoRAState, lora: LoRA) -> LoRA:
        """(B R, R^T A), float64; as it came while the reference's B is zero."""
        (B, A), (B_ref, A_ref) = lora.factors, state.mean.map(Tensor.double).factors
        if not bool(B_ref.any()):
            return lora
        cross = A @ A_ref.mT if state.rounds % 2 else B.mT @ B_ref
        R = _nearest_orthogonal(cross)
        if self.rotate_lambda <= 1:
            if float(torch.linalg.det(R)) < 0:  # no path from I leads to a reflection
                R = _nearest_orthogonal(cross, rotation=True)
            one = torch.eye(len(R)).to(R)
            R = _nearest_orthogonal((1 - self.rotate_lambda) * one + self.rotate_lambda * R)
        return LoRA(B @ R, R.mT @ A)

    def readout(self, state: FedRotLoRAState, client: str | None, rank: int) -> LoRA:
        return state.mean

    def effective(self, state: FedRotLoRAState) -> LoRA:
        return state.mean

    def diagnostics(self, state: FedRotLoRAState) -> Mapping[str, object]:
        return {"rank": state.mean.rank}


def _nearest_orthogonal(X: Tensor, *, rotation: bool = False) -> Tensor:
    """U V^T of X = U S V^T; with `rotation`, the nearest with determinant +1."""
    U, _, Vh = torch.linalg.svd(X)
    if rotation and float(torch.linalg.det(U @ Vh)) < 0:
        U = torch.cat([U[:, :-1], -U[:, -1:]], dim=1)
    nearest: Tensor = U @ Vh
    return nearest
