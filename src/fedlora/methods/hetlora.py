"""HetLoRA: zero-pad the factors, weigh clients by the size of their update, cut to each rank (Cho et al., 2401.06432).

    w_i = ||B_i A_i||_F / sum_j ||B_j A_j||_F
    B <- sum_i w_i [B_i 0]        A <- sum_i w_i [A_i; 0]        read out: B[:, :r_i], A[:r_i, :]

Any ranks, which stay as they are (the paper's clients also prune theirs); not exact, not gauge-invariant (the weights
are, because they depend on products). Each module has its own weights. Deviation from the only public code (in
FlexLoRA's repository): it has no sparsity weights. In the first round every update may be zero; then p_i is used.
Cost: O(sum r_i^2 (d_out + d_in)), by QR factors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from fedlora.core.lora import LoRA, revive
from fedlora.core.method import Readout, Roles, Update
from fedlora.core.multiplied import How, TakesMultipliers
from fedlora.errors import HyperparameterError
from fedlora.methods._slots import first, mean_columns, mean_rows

Weights = Literal["sparsity", "examples"]


@dataclass(frozen=True, eq=False)
class HetLoRAState:
    """mean: the averaged zero-padded pair, at the largest rank seen. weights: client -> w_i of the last round."""

    TAG: ClassVar[str] = "hetlora/1"

    key: int
    round: int
    mean: LoRA
    weights: Mapping[str, float]


@dataclass(frozen=True)
class HetLoRA(TakesMultipliers):
    """Use it as the factor-averaging baseline for clients of different ranks.

    Args:
        weights: "sparsity" (the paper's w_i by the update's norm, for each module) or "examples" (the server's p_i).
    """

    name: ClassVar[str] = "hetlora"
    paper: ClassVar[str] = "arXiv 2401.06432"
    State: ClassVar[type] = HetLoRAState

    weights: Weights = "sparsity"

    def __post_init__(self) -> None:
        if self.weights not in get_args(Weights):
            raise HyperparameterError(f"hetlora: weights is one of {get_args(Weights)}; got {self.weights!r}.")

    def init(self, seed: LoRA, key: int) -> HetLoRAState:
        return HetLoRAState(key, 0, seed, {})

    def roles(self, round: int) -> Roles:
        return Roles()

    @property
    def multiplied(self) -> How:
        """It averages slots: factors must have the same shape."""
        return "factors"

    def require_multipliers(self, columns: int | None = None) -> None:
        """Weights by the size of an update would undo any rule: a client that sends more counts more."""
        if self.weights != "examples":
            raise HyperparameterError(
                f"hetlora: weights = {self.weights!r} weighs clients by the size of their uploads, so that a liar who "
                f"sends more counts more, whatever a robust rule says. Set method.weights = 'examples'."
            )

    def aggregate(self, state: HetLoRAState, updates: Sequence[Update]) -> HetLoRAState:
        w = [u.weight for u in updates]
        sizes = [u.lora.norm() for u in updates] if self.weights == "sparsity" else []
        if any(sizes):
            w = [size / math.fsum(sizes) for size in sizes]
        rank = max(state.mean.rank, *(u.lora.rank for u in updates))
        mean = LoRA(mean_columns([u.B for u in updates], w, rank), mean_rows([u.A for u in updates], w, rank))
        shown = {u.client: x for u, x in zip(updates, w, strict=True)}
        return HetLoRAState(state.key, state.round + 1, mean, shown)

    def readout(self, state: HetLoRAState, client: str | None, rank: int) -> Readout:
        return Readout(revive(first(state.mean, rank), state.key, state.round, client or ""))

    def effective(self, state: HetLoRAState) -> LoRA:
        return state.mean

    def diagnostics(self, state: HetLoRAState) -> Mapping[str, object]:
        return {"rank": state.mean.rank, "weights": dict(state.weights)}
