"""The weighted sum of tensors of one shape: every mean of factors or heads uses it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def weighted_mean(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """sum_i w_i X_i for tensors of one shape and dtype, summed in float64 in the given order: if they cancel, rounding
    of each w_i X_i would show."""
    total = tensors[0].double() * weights[0]
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        total.add_(tensor, alpha=weight)
    return total.to(tensors[0].dtype)
