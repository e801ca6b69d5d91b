"""Whether two steps on tied weights do the same, so that one tensor may stay one."""

from __future__ import annotations

import torch
from torch import Tensor

from fedlora.adapters.weight_changes import Replaced, Rows, Step, Update
from fedlora.linalg import norm

_SAME = 1e-5  # two updates of tied weights that differ by less, relatively, are one: merging rounds each by itself


def same_value(one: Step, other: Step) -> bool:
    """Whether two steps on tied weights do the same: equal tensors, or updates that are equal up to rounding."""
    if isinstance(one, Update) and isinstance(other, Update):
        return _difference(_oriented(one), _oriented(other)) <= _SAME
    if isinstance(one, Replaced) and isinstance(other, Replaced):
        return torch.equal(one.file.head(one.head), other.file.head(other.head))
    if isinstance(one, Rows) and isinstance(other, Rows):
        return tuple(one.indices) == tuple(other.indices) and torch.equal(
            one.file.head(one.head), other.file.head(other.head)
        )
    return False


def _oriented(update: Update) -> tuple[Tensor, Tensor]:
    pair, scale = update.file.unscaled(update.layout.modules(update.path)[0])
    B, A = (t.double() for t in pair.factors)
    B = B * scale
    return (A.mT, B.mT) if update.transposed else (B, A)


def _difference(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> float:
    """|L1 R1 - L2 R2| / |L1 R1| without making the products."""
    if one[0].shape[0] != other[0].shape[0] or one[1].shape[1] != other[1].shape[1]:
        return float("inf")

    def size_of(left: Tensor, right: Tensor) -> float:
        upper, lower = torch.linalg.qr(left).R, torch.linalg.qr(right.mT).R
        return float(norm(upper @ lower.mT))

    apart = size_of(torch.cat([one[0], -other[0]], 1), torch.cat([one[1], other[1]], 0))
    size = size_of(*one)
    return apart / size if size else apart
