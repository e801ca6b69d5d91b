"""Roundoffs, norms and means.

Everything between the stored factors and the stored result is float64. Whether a direction of *one client's* factors is
rounding depends on the dtype in which they were *stored*. No such judgement ever cuts a mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor


@cache
def unit_roundoff(dtype: torch.dtype) -> float:
    """u, the largest relative error of rounding to `dtype`: 1.1e-16 (float64), 6e-8 (float32), 3.9e-3 (bfloat16)."""
    return torch.finfo(dtype).eps / 2


U64 = unit_roundoff(torch.float64)


def rank_tolerance(roundoff: float) -> float:
    """The relative size below which a singular value counts as rounding, of factors that were stored with `roundoff`.

    u itself for narrow types; 1e-11 for float64, because a gauge of condition up to 1e3 often multiplies the noise of
    its factors. Calibrated by benchmarks/rank_tolerance.py.
    """
    return max(roundoff, 1e-11)


def float64s(values: Sequence[float] | Sequence[Sequence[float]], like: Tensor) -> Tensor:
    """Python's floats as they are: `torch.tensor` would store them in float32, and the mean would be off by 3e-8."""
    return torch.tensor(values, dtype=torch.float64, device=like.device)


def norm(X: Tensor, dim: int | None = None) -> Tensor:
    """The Euclidean norm of all numbers, or along a dimension, in float64."""
    found: Tensor = torch.linalg.vector_norm(X.double(), dim=dim)
    return found


def weighted_mean(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """sum_i w_i X_i for tensors of one shape and dtype, summed in float64 in the given order: if they cancel, rounding
    of each w_i X_i would show."""
    total = tensors[0].double() * weights[0]
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        total.add_(tensor, alpha=weight)
    return total.to(tensors[0].dtype)
