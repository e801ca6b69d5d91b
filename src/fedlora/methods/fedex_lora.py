"""FedEx-LoRA: average the factors, and add their error to the base weight (Singhal et al., 2410.09432).

    B <- sum_i p_i B_i     A <- sum_i p_i A_i     W0 <- W0 + ( sum_i p_i B_i A_i - B A )

The server's update is exact and gauge-invariant, but the pair (B, A) that clients train is not. If the terms of B A are
over a hundred times the clients' updates, for example because one client's factors are (B_i c, A_i / c), the residual
would lose the mean in rounding; the method then averages the factors of each update's balanced SVD. One common rank.
If these terms are over four times the mean update, it also corrects the rounding of the stored pair.
The residuals add up in a `BaseChange`, so a client that missed rounds gets the steps that it lacks. Deviations from the
authors' code: weights p_i instead of a uniform mean, and no transpose of the residual, which is wrong there for
`nn.Linear`.
Cost: thin SVDs of stacks of (n + 1) r and of rank(base) + n r columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedlora.core.base_change import BaseChange, added, moved
from fedlora.core.lora import LoRA, revive, stack
from fedlora.core.method import Readout, Roles, Update
from fedlora.core.multiplied import How, TakesMultipliers, plain_pair
from fedlora.linalg import norm
from fedlora.linalg.weighted_mean import weighted_mean
from fedlora.methods._factors import require_one_rank
from fedlora.methods._spectral import mean_pair, rounding_share

# The limit for the averaged pair's terms, relative to the clients' updates. If one client's factors are (B c, A / c),
# they are c times as large, and the residual must cancel them: 1e10 leaves 6 digits of float64, 1e16 none.
_BORNE = 100.0
# If the mean update's terms exceed it by this factor, the residual also holds the rounding of the stored pair.
_OWN = 4.0


@dataclass(frozen=True, eq=False)
class FedExLoRAState:
    """mean: the averaged pair. base: all residuals so far, W0 -> W0 + base; None if there are none. rounding: the share
    of the last mean's energy that rounding of the uploads could make up. balanced: the pair averages balanced factors.
    """

    TAG: ClassVar[str] = "fedex-lora/1"

    key: int
    round: int
    mean: LoRA
    base: BaseChange | None
    rounding: float = 0.0
    balanced: bool = False


@dataclass(frozen=True)
class FedExLoRA(TakesMultipliers):
    """Use it if aggregation must be exact, ranks are equal, and clients can accept changes of the base weight."""

    name: ClassVar[str] = "fedex-lora"
    paper: ClassVar[str] = "arXiv 2410.09432"
    State: ClassVar[type] = FedExLoRAState

    def init(self, seed: LoRA, key: int) -> FedExLoRAState:
        return FedExLoRAState(key, 0, seed, None)

    def roles(self, round: int) -> Roles:
        return Roles(moves_base=True)

    @property
    def multiplied(self) -> How:
        """One rank for all, and a sum of any number of terms: the residual holds what the averaged pair misses."""
        return "terms"

    def aggregate(self, state: FedExLoRAState, updates: Sequence[Update]) -> FedExLoRAState:
        for u in updates:
            require_one_rank("FedEx-LoRA", state.mean.rank, u.client, u.rank)
        p = [u.weight for u in updates]
        loras = [u.lora for u in updates]
        mean, exact = _averaged(loras, p), mean_pair(updates)
        balanced = _terms(mean) > _BORNE * math.fsum(abs(w) * lora.norm() for w, lora in zip(p, loras, strict=True))
        if balanced:
            mean = _averaged([plain_pair(lora) for lora in loras], p)
        if balanced or _terms(mean) > _OWN * exact.norm():
            step = stack([exact, mean.map(Tensor.double)], [1.0, -1.0])
        else:
            step = residual(loras, p)
        base = moved(state.base, step, mean.factors[0].dtype)
        return FedExLoRAState(state.key, state.round + 1, mean, base, rounding_share(updates, exact), balanced)

    def readout(self, state: FedExLoRAState, client: str | None, rank: int) -> Readout:
        require_one_rank("FedEx-LoRA", state.mean.rank, client, rank)
        return Readout(revive(state.mean, state.key, state.round, client or ""), base=state.base)

    def effective(self, state: FedExLoRAState) -> LoRA:
        if state.base is None:
            return state.mean
        # Both can be far larger than their sum if clients use opposite coordinates.
        return added(state.base.total, state.mean).map(lambda t: t.to(state.mean.factors[0]))

    def diagnostics(self, state: FedExLoRAState) -> Mapping[str, object]:
        base_rank = state.base.total.rank if state.base else 0
        return {
            "rank": state.mean.rank, "base_rank": base_rank, "rounding": state.rounding, "balanced": state.balanced,
        }  # fmt: skip


def _averaged(loras: Sequence[LoRA], weights: Sequence[float]) -> LoRA:
    return LoRA(*(weighted_mean([lora.factors[k] for lora in loras], weights) for k in (0, 1)))


def _terms(lora: LoRA) -> float:
    """The size of the products of its columns of B with their rows of A, which may cancel in B A."""
    B, A = lora.factors
    return float(norm(norm(B, dim=0) * norm(A, dim=1)))


def residual(loras: Sequence[LoRA], weights: Sequence[float]) -> LoRA:
    """sum_i p_i B_i A_i minus the product of the averaged pair, as one float64 pair, without cancellation.

    With P = sum_i p_i (below 1 if clients without a module count as zero) and the means B, A over P, it is the sum of
    p_i (B_i - B)(A_i - A), and (P - P^2) B A. If clients are near each other, the residual is small, and a difference
    of two large products would lose it in rounding. Storing the pair costs its own roundoff of either product.
    """
    P = math.fsum(weights)
    pairs = [tuple(t.double() for t in lora.factors) for lora in loras]
    B, A = (weighted_mean([pair[k] for pair in pairs], [p / P for p in weights]) for k in (0, 1))
    parts, shares = [LoRA(B_i - B, A_i - A) for B_i, A_i in pairs], list(weights)
    if P != 1:
        parts, shares = [*parts, LoRA(B, A)], [*shares, P - P * P]
    return stack(parts, shares)
