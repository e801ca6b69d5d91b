"""LoRA-FAIR: average the factors, then correct B so that the product points where the mean points (Bian et al.,
2411.14961).

    X = sum_i p_i B_i A_i    B = sum_i p_i B_i    A = sum_i p_i A_i
    dB = argmin D(X, (B + dB) A) + lambda ||dB||_F^2                read out: (B + dB, A)

D is 1 - cosine, averaged over the columns of both matrices, or of the flattened matrices. Better than FedIT but not
exact, because the row space stays A's. Not gauge-invariant. One common rank. A cosine ignores scale, so the update
stays about as large as B A. L-BFGS searches the minimum from dB = 0, within the columns that clients sent. Cost: a QR
of n r columns, and O(n r^2 d_in) for each step of the search.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from fedlora.core.lora import LoRA, stack
from fedlora.core.method import Method, Update
from fedlora.errors import HyperparameterError
from fedlora.methods.fedit import mean_factors

Metric = Literal["columns", "cosine"]


@dataclass(frozen=True)
class LoRAFAIR(Method[LoRA]):
    """Use it to see how much a correction of averaged factors helps. State: the corrected pair.

    Args:
        metric: D: 1 - the mean cosine of the "columns", as in public code that descends from the authors', or 1 - the
            "cosine" of the flattened matrices.
        lambda_: weight of ||dB||_F^2, > 0. B travels as (alpha / r) B, and a cosine ignores scale: the same model with
            `lora_alpha` pays (alpha / r)^2 times as much for a correction as with `scaling`.
    """

    name: ClassVar[str] = "lora-fair"
    paper: ClassVar[str] = "arXiv 2411.14961"
    one_rank: ClassVar[bool] = True

    metric: Metric = "columns"
    lambda_: float = 0.01

    def __post_init__(self) -> None:
        if self.metric not in get_args(Metric):
            raise HyperparameterError(f"lora-fair: metric is one of {get_args(Metric)}; got {self.metric!r}.")
        if not 0 < self.lambda_ < math.inf:
            raise HyperparameterError(f"lora-fair: lambda_ is positive and finite; got {self.lambda_}.")

    def init(self, seed: LoRA) -> LoRA:
        return seed

    def aggregate(self, state: LoRA, updates: Sequence[Update]) -> LoRA:
        like = updates[0].lora.factors[0]
        sent = [u.lora.map(Tensor.double) for u in updates]
        B, A = mean_factors(updates).map(Tensor.double).factors
        left, right = stack(sent, [u.weight for u in updates]).factors
        # The columns of X, B and the best dB lie in the span of the clients' columns: all is done in coordinates of Q.
        Q, T = torch.linalg.qr(left)
        X, B = T @ right, Q.mT @ B
        return LoRA(Q @ self._corrected(X, B, A), A).map(lambda t: t.to(like))

    def _corrected(self, X: Tensor, B: Tensor, A: Tensor) -> Tensor:
        """B + dB."""
        unit = float(torch.linalg.matrix_norm(B @ A))
        if unit == 0:
            return B  # zero has no direction
        # Search W = dB sqrt(A A^T) / ||B A||, which moves B A about equally in every direction, whatever A is. In dB
        # itself the search ends up to 2 % away from the minimum if A has condition 100, and misses it at 1e4.
        values, V = torch.linalg.eigh(A @ A.mT)
        scale = unit * (V / (values + 1e-6 * values[-1]).sqrt()) @ V.mT
        W = torch.zeros_like(B)
        search: torch.optim.Optimizer = torch.optim.LBFGS(
            [W], max_iter=500, history_size=30, tolerance_grad=1e-9, tolerance_change=1e-16,
            line_search_fn="strong_wolfe",
        )  # fmt: skip

        def loss() -> float:
            dB = W @ scale
            cosine, slope = self._cosine(X, (B + dB) @ A)
            W.grad = (2 * self.lambda_ * dB - slope @ A.mT) @ scale
            return 1 - cosine + self.lambda_ * float(dB.square().sum())

        search.step(loss)
        best = B + W @ scale
        # A cosine ignores length, so at the minimum dB is orthogonal to B + dB: take that point of its line. If the
        # mean update points away from B A, the line has none (its best end is zero): what the search found stays.
        length = float((B * best).sum() / best.square().sum())
        corrected: Tensor = best * length if length > 0 else best
        return corrected

    def _cosine(self, X: Tensor, Y: Tensor) -> tuple[float, Tensor]:
        """(the cosine of X and Y, its gradient in Y). A column that is zero on either side counts as 0."""
        if self.metric == "cosine":
            cosine, slope = _mean_cosine(X.reshape(-1, 1), Y.reshape(-1, 1))
            return cosine, slope.reshape(Y.shape)
        return _mean_cosine(X, Y)

    def readout(self, state: LoRA, client: str | None, rank: int) -> LoRA:
        return state

    def effective(self, state: LoRA) -> LoRA:
        return state


def _mean_cosine(X: Tensor, Y: Tensor) -> tuple[float, Tensor]:
    """The mean over columns, and d cos / d y = x / (||x|| ||y||) - cos y / ||y||^2 of each by their number."""
    x, y = torch.linalg.vector_norm(X, dim=0), torch.linalg.vector_norm(Y, dim=0)
    some = (x > 0) & (y > 0)
    cosines = torch.where(some, (X * Y).sum(dim=0) / x / y, 0.0)
    slopes = torch.where(some, X / x / y - cosines * Y / y.square(), 0.0)
    return float(cosines.mean()), slopes / len(cosines)
