"""FedEx-LoRA: average the factors, and put what that got wrong into the base weight (Singhal et al., 2410.09432).

    B <- sum_i p_i B_i     A <- sum_i p_i A_i     W0 <- W0 + ( sum_i p_i B_i A_i - B A )

The server's update is exact and gauge-invariant, but the pair (B, A) that clients train on is not. Where the product
B A is over a hundred times the clients' updates, as when one client's factors are (B_i c, A_i / c), the residual would
lose the mean in rounding: then the factors that are averaged are those of each update's balanced SVD. One common rank.
Where its terms are over four times the mean update, the residual also makes up for what storing the pair costs.
The residuals add up in a `BaseChange`, so that a client that missed rounds gets the steps that it lacks. Deviations
from the authors' code: weights p_i instead of a uniform mean, and no transpose of the residual, which is wrong there
for `nn.Linear`.
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
from fedlora.methods._factors import require_one_rank, require_readout_rank
from fedlora.methods._spectral import mean_pair, rounding_share

# How much larger than the clients' updates the product of the averaged pair may be. Where one client's factors are
# (B c, A / c) it is c times as large, and the residual must cancel it: 1e10 leaves 6 digits of float64, 1e16 none.
_BORNE = 100.0
# How much larger than the mean update its terms may be before what storing it costs belongs to the residual too.
_OWN = 4.0


@dataclass(frozen=True, eq=False)
class FedExLoRAState:
    """mean: the averaged pair. base: all residuals so far, W0 -> W0 + base; None while there is none. rounding: the
    share of the last mean's energy that rounding of the uploads could be. balanced: the pair averages balanced factors.
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
    """Use it where exact aggregation matters, ranks are equal, and clients can take changes of the base weight."""

    name: ClassVar[str] = "fedex-lora"
    paper: ClassVar[str] = "arXiv 2410.09432"
    State: ClassVar[type] = FedExLoRAState

    def init(self, seed: LoRA, key: int) -> FedExLoRAState:
        return FedExLoRAState(key, 0, seed, None)

    def roles(self, round: int) -> Roles:
        return Roles(moves_base=True)

    @property
    def multiplied(self) -> How:
        """One rank for all, and a sum of any number of terms: the residual holds what the averaged pair lacks."""
        return "terms"

    def aggregate(self, state: FedExLoRAState, updates: Sequence[Update]) -> FedExLoRAState:
        require_one_rank("FedEx-LoRA", state.mean.rank, updates)
        p = [u.weight for u in updates]
        loras = [u.lora for u in updates]
        mean, exact = _averaged(loras, p), mean_pair(updates)
        balanced = _size(mean) > _BORNE * math.fsum(abs(w) * _size(lora) for w, lora in zip(p, loras, strict=True))
        if balanced:
            mean = _averaged([plain_pair(lora) for lora in loras], p)
        if balanced or norm(norm(mean.factors[0], dim=0) * norm(mean.factors[1], dim=1)) > _OWN * exact.norm():
            step = stack([exact, mean.map(Tensor.double)], [1.0, -1.0])
        else:
            step = residual(loras, p)
        base = moved(state.base, step, mean.factors[0].dtype)
        return FedExLoRAState(state.key, state.round + 1, mean, base, rounding_share(updates, exact), balanced)

    def readout(self, state: FedExLoRAState, client: str | None, rank: int) -> Readout:
        require_readout_rank("FedEx-LoRA", state.mean.rank, client, rank)
        return Readout(revive(state.mean, state.key, state.round, client or ""), base=state.base)

    def effective(self, state: FedExLoRAState) -> LoRA:
        if state.base is None:
            return state.mean
        # Both can be far larger than their sum, where clients sit in opposite coordinates.
        return added(state.base.total, state.mean).map(lambda t: t.to(state.mean.factors[0]))

    def diagnostics(self, state: FedExLoRAState) -> Mapping[str, object]:
        base_rank = state.base.total.rank if state.base else 0
        return {
            "rank": state.mean.rank, "base_rank": base_rank, "rounding": state.rounding, "balanced": state.balanced,
        }  # fmt: skip


def _averaged(loras: Sequence[LoRA], weights: Sequence[float]) -> LoRA:
    return LoRA(*(weighted_mean([lora.factors[k] for lora in loras], weights) for k in (0, 1)))


def _size(lora: LoRA) -> float:
    """||B|| ||A||: what its product is at most."""
    return math.prod(float(norm(t)) for t in lora.factors)


def residual(loras: Sequence[LoRA], weights: Sequence[float]) -> LoRA:
    """sum_i p_i B_i A_i less the product of the averaged pair, as one pair in float64, without cancellation.

    With P = sum_i p_i (below 1 where clients without a module count as zero) and the means B, A over P it is the sum of
    p_i (B_i - B)(A_i - A), and (P - P^2) B A. Clients that are near each other have a small residual, which a
    difference of two large products would lose in rounding. Storing the pair costs its own roundoff of either product.
    """
    P = math.fsum(weights)
    pairs = [tuple(t.double() for t in lora.factors) for lora in loras]
    B, A = (weighted_mean([pair[k] for pair in pairs], [p / P for p in weights]) for k in (0, 1))
    parts, shares = [LoRA(B_i - B, A_i - A) for B_i, A_i in pairs], list(weights)
    if P != 1:
        parts, shares = [*parts, LoRA(B, A)], [*shares, P - P * P]
    return stack(parts, shares)
