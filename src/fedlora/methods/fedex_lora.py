"""FedEx-LoRA: average the factors, and add their error to the base weight (Singhal et al., 2410.09432).

    B <- sum_i p_i B_i     A <- sum_i p_i A_i     W0 <- W0 + ( sum_i p_i B_i A_i - B A )

The server's update is exact and gauge-invariant, but the pair (B, A) that clients train is not. One common rank. The
residuals add up in a `BaseChange`, so a client that missed rounds gets the steps that it lacks. Cost: a thin SVD of n r
columns; of rank(base) + r more to read the whole update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from fedlora.core.base_change import BaseChange, added, moved
from fedlora.core.lora import LoRA, stack
from fedlora.core.method import LinearIn, Method, Update
from fedlora.linalg import Term, norm, projected_sums
from fedlora.linalg.basics import U64
from fedlora.methods.fedit import mean_factors

# Storing the pair rounds it by u times its terms b_j a_j. Usually that is u times the mean, as with every method. If
# clients' coordinates are bad, the terms are larger and cancel in the sum; beyond this factor the residual also takes
# back what storing rounded. It has 2 r columns more then, which all clients must be sent.
_LARGE = 4.0


@dataclass(frozen=True, eq=False)
class FedExLoRAState:
    """mean: the averaged pair. moved: all residuals so far, W0 -> W0 + moved; None: none yet."""

    mean: LoRA
    moved: BaseChange | None


@dataclass(frozen=True)
class FedExLoRA(Method[FedExLoRAState]):
    """Use it if aggregation must be exact, ranks are equal, and clients can accept changes of the base weight."""

    name: ClassVar[str] = "fedex-lora"
    paper: ClassVar[str] = "arXiv 2410.09432"
    State: ClassVar[type] = FedExLoRAState
    one_rank: ClassVar[bool] = True
    claims: ClassVar[frozenset[str]] = frozenset({"exact", "gauge", "halves"})
    linear_in: ClassVar[LinearIn] = "products"

    def init(self, seed: LoRA) -> FedExLoRAState:
        return FedExLoRAState(seed, None)

    def aggregate(self, state: FedExLoRAState, updates: Sequence[Update]) -> FedExLoRAState:
        return FedExLoRA.aggregate_all(self, [state], [updates])[0]

    def aggregate_all(
        self, states: Sequence[FedExLoRAState], updates: Sequence[Sequence[Update]]
    ) -> list[FedExLoRAState]:
        means, residuals = zip(*map(_mean_and_residual, updates), strict=True)
        steps = projected_sums(residuals, [None] * len(residuals))
        return [
            FedExLoRAState(mean, moved(state.moved, step.spectrum, mean.factors[0].dtype))
            for state, mean, step in zip(states, means, steps, strict=True)
        ]

    def readout(self, state: FedExLoRAState, client: str | None, rank: int) -> LoRA:
        return state.mean

    def effective(self, state: FedExLoRAState) -> LoRA:
        if state.moved is None:
            return state.mean
        # Both can be far larger than their sum if clients use opposite coordinates, so they are added in float64.
        return added(state.moved.total, state.mean).map(lambda t: t.to(state.mean.factors[0]))

    def base(self, state: FedExLoRAState) -> BaseChange | None:
        return state.moved

    def diagnostics(self, state: FedExLoRAState) -> Mapping[str, object]:
        return {"rank": state.mean.rank}


def _mean_and_residual(updates: Sequence[Update]) -> tuple[LoRA, list[Term]]:
    """The averaged pair as stored, and sum_i p_i B_i A_i - B A as terms in float64."""
    like = updates[0].lora.factors[0]
    loras = [u.lora.map(Tensor.double) for u in updates]
    mean = mean_factors([replace(u, lora=lora) for u, lora in zip(updates, loras, strict=True)])
    stored = mean.map(lambda t: t.to(like))
    B, A = mean.factors
    # Without a difference of large products, which would lose a small residual: as the weights sum to 1, it is
    # sum_i p_i (B_i - B)(A_i - A).
    residual = [
        Term(lora.factors[0] - B, lora.factors[1] - A, u.weight, U64) for u, lora in zip(updates, loras, strict=True)
    ]
    left, right = stack(loras, [u.weight for u in updates]).factors
    size = float(((left.mT @ left) * (right @ right.mT)).sum().clamp(min=0).sqrt())  # of the mean, to 1e-8 of terms
    if float(norm(norm(B, dim=0) * norm(A, dim=1))) > _LARGE * size:
        B_s, A_s = stored.map(Tensor.double).factors
        residual += [Term(B - B_s, A, 1.0, U64), Term(B_s, A - A_s, 1.0, U64)]
    return stored, residual
