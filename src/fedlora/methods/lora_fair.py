"""LoRA-FAIR: average the factors, then correct B so that the product points where the mean points (Bian et al.,
2411.14961).

    B = sum_i p_i B_i     A = sum_i p_i A_i     dB = argmin D( sum_i p_i B_i A_i, (B + dB) A ) + lambda ||dB||_F^2
    read out: (B + dB, A)

D is 1 - cosine of the flattened matrices (the paper's), or the squared distance ("l2") with a closed-form minimum:

    dB = (G - B P)(P + lambda I)^-1,  G = sum p_i B_i A_i A^T,  P = A A^T

Better than FedIT but not exact, because the row space stays A's. Not gauge-invariant. One common rank. No d_out x d_in
matrix: D follows from G, P and the norm of the mean. Deviations: descriptions of the method do not say whether the norm
is squared (here it is), and they stop after a fixed number of gradient steps; here L-BFGS searches the minimum from
dB = 0. The cosine ignores scale: the update stays about as large as B A. Cost: O(n r^2 (d_out + d_in)), and O(r^2
d_out) for each iteration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from fedlora.core.lora import LoRA, revive
from fedlora.core.method import Readout, Roles, Update
from fedlora.errors import HyperparameterError
from fedlora.linalg.weighted_mean import weighted_mean
from fedlora.methods._factors import require_one_rank
from fedlora.methods._spectral import mean_pair

Metric = Literal["cosine", "l2"]


@dataclass(frozen=True, eq=False)
class LoRAFAIRState:
    """pair: the corrected average. before, after: the cosine of (B A, mean update) without and with the correction."""

    TAG: ClassVar[str] = "lora-fair/1"

    key: int
    round: int
    pair: LoRA
    before: float
    after: float


@dataclass(frozen=True)
class LoRAFAIR:
    """Use it to see how much a correction of averaged factors helps.

    Args:
        metric: D: "cosine" (the paper's, which ignores scale: the update stays about as large as B A) or "l2", the
            squared distance.
        lambda_: weight of ||dB||_F^2, > 0, in units of B."""

    name: ClassVar[str] = "lora-fair"
    paper: ClassVar[str] = "arXiv 2411.14961"
    State: ClassVar[type] = LoRAFAIRState

    metric: Metric = "cosine"
    lambda_: float = 0.01

    def __post_init__(self) -> None:
        if self.metric not in get_args(Metric):
            raise HyperparameterError(f"lora-fair: metric is one of {get_args(Metric)}; got {self.metric!r}.")
        if not 0 < self.lambda_ < math.inf:
            raise HyperparameterError(f"lora-fair: lambda_ is positive and finite; got {self.lambda_}.")

    def init(self, seed: LoRA, key: int) -> LoRAFAIRState:
        return LoRAFAIRState(key, 0, seed, math.nan, math.nan)

    def roles(self, round: int) -> Roles:
        return Roles()

    def aggregate(self, state: LoRAFAIRState, updates: Sequence[Update]) -> LoRAFAIRState:
        for u in updates:
            require_one_rank("LoRA-FAIR", state.pair.rank, u.client, u.rank)
        p = [u.weight for u in updates]
        B, A = weighted_mean([u.B for u in updates], p), weighted_mean([u.A for u in updates], p)
        target = _Target.of(mean_pair(updates), A)
        start = B.double()
        if self.metric == "l2":
            ridge = target.P + self.lambda_ * torch.eye(len(A), dtype=torch.float64, device=A.device)
            best = start + torch.linalg.solve(ridge, target.G - start @ target.P, left=False)
        else:
            best = self._turned(start, target)
        cosines = float(target.cosine(start)), float(target.cosine(best))
        return LoRAFAIRState(state.key, state.round + 1, LoRA(best.to(B), A), *cosines)

    def _turned(self, B: Tensor, target: _Target) -> Tensor:
        """B + dB for the cosine; B itself if one side is zero, because zero has no direction."""
        if not math.isfinite(float(target.cosine(B))):
            return B
        unit = float(torch.linalg.matrix_norm(B))  # search dB in units of B, whatever its size
        dB = torch.zeros_like(B)
        optimizer = torch.optim.LBFGS(
            [dB], max_iter=500, tolerance_grad=1e-10, tolerance_change=1e-14, line_search_fn="strong_wolfe"
        )

        def loss() -> float:
            turned = B + unit * dB
            penalty = self.lambda_ * unit**2
            dB.grad = unit * target.fall(turned) + 2 * penalty * dB
            return float(1 - target.cosine(turned) + penalty * dB.square().sum())

        optimizer.step(loss)  # type: ignore[no-untyped-call]
        best = B + unit * dB
        # The cosine ignores length along the best direction, so take the point nearest to B.
        length = float((B * best).sum() / best.square().sum())
        return best * length if length > 0 else best

    def readout(self, state: LoRAFAIRState, client: str | None, rank: int) -> Readout:
        require_one_rank("LoRA-FAIR", state.pair.rank, client, rank)
        return Readout(revive(state.pair, state.key, state.round, client or ""))

    def effective(self, state: LoRAFAIRState) -> LoRA:
        return state.pair

    def diagnostics(self, state: LoRAFAIRState) -> Mapping[str, object]:
        return {"rank": state.pair.rank, "cosine_before": state.before, "cosine_after": state.after}


@dataclass(frozen=True, eq=False)
class _Target:
    """The mean update X in the form that D needs: G = X A^T (d_out, r), P = A A^T (r, r), ||X||; all float64."""

    G: Tensor
    P: Tensor
    norm: float

    @classmethod
    def of(cls, mean: LoRA, A: Tensor) -> _Target:
        B_all, A_all = (t.double() for t in mean.factors)
        A = A.double()
        return cls(B_all @ (A_all @ A.mT), A @ A.mT, mean.norm())

    def cosine(self, B: Tensor) -> Tensor:
        """cos(X, B A) = <G, B> / (||X|| sqrt(tr(B P B^T))); NaN if either is zero."""
        inner: Tensor = (self.G * B).sum()
        return inner / (self.norm * ((B @ self.P) * B).sum().clamp(min=0).sqrt())

    def fall(self, B: Tensor) -> Tensor:
        """The gradient of 1 - cos(X, B A) with respect to B."""
        BP = B @ self.P
        size = (BP * B).sum().clamp(min=0).sqrt()
        # In this order nothing overflows.
        return ((self.G * B).sum() / size**2 * BP - self.G) / (self.norm * size)
