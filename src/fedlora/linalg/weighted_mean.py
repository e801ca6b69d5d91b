"""The weighted sum of tensors of one shape: what every mean of factors or heads comes down to."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def weighted_mean(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """sum_i w_i X_i for tensors of one shape and dtype, added up in float64 in the order given: where they cancel,
    rounding of each w_i X_i would show."""
    total = tensors[0].double() * weights[0]
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        total.add_(tensor, alpha=weight)
    return total.to(tensors[0].dtype)
