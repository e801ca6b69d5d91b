"""Running sums of one matrix's factors, for methods that average factors (`core.summing.FromMeans`).

It keeps them by rank, 8 r (d_out + d_in) bytes for each rank that a client sends, however many clients there are. So a
method pads or refuses different ranks exactly as with kept uploads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedlora.core.lora import LoRA
from fedlora.core.method import NOBODY, Update


@dataclass(eq=False)
class FactorSums:
    """The sums of one matrix so far, weighted by n_i. by_rank: r_i -> the sums at that rank."""

    dtype: torch.dtype = torch.float32
    weight: float = 0.0
    by_rank: dict[int, _OfOneRank] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for group in self.by_rank.values() for t in (group.B, group.A) if t is not None)

    def add(self, updates: Sequence[Update]) -> None:
        """Add updates with weights n_i, in place."""
        for u in updates:
            self.dtype = torch.promote_types(self.dtype, next(iter(u.lora.tensors().values())).dtype)
            self.weight += u.weight
            self.by_rank.setdefault(u.rank, _OfOneRank(u.stored)).add(u)

    def means(self, total: float | None) -> list[Update]:
        """The input of `aggregate`: the weighted mean at each rank. total: the sum of all weights; None: of those
        added."""
        total = self.weight if total is None else total
        return [group.mean(rank, self.dtype, total) for rank, group in sorted(self.by_rank.items())]


@dataclass(eq=False)
class _OfOneRank:
    """sum n_i B_i and sum n_i A_i, float64; None if that factor did not travel. stored: the coarsest dtype among the
    uploads."""

    stored: torch.dtype
    weight: float = 0.0
    B: Tensor | None = None
    A: Tensor | None = None

    def add(self, update: Update) -> None:
        self.stored = max(self.stored, update.stored, key=lambda dtype: torch.finfo(dtype).eps)
        self.weight += update.weight
        self.B = _added(self.B, update.lora.B, update.weight)
        self.A = _added(self.A, update.lora.A, update.weight)

    def mean(self, rank: int, dtype: torch.dtype, total: float) -> Update:
        B, A = (None if t is None else (t / self.weight).to(dtype) for t in (self.B, self.A))
        return Update(NOBODY, self.weight / total, rank, LoRA(B, A), self.stored)


def _added(total: Tensor | None, factor: Tensor | None, weight: float) -> Tensor | None:
    if factor is None:
        return None
    return factor.double() * weight if total is None else total.add_(factor.double(), alpha=weight)
