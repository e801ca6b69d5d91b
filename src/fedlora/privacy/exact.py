"""Sums of squares of integers without rounding, for deciding "never above the bound"."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LIMB = 21  # bits: a product of two limbs has 42, and 2^20 such products sum to less than 2^62
_BLOCK = 2**20
LARGEST = 2 ** (2 * _LIMB) - 1  # the largest allowed absolute value


def squared_norm(integers: Tensor) -> int:
    """sum x^2 of an int64 vector as a Python integer, exact for absolute values up to 2^42 - 1.

    Each |x| is h 2^21 + l, so that x^2 = h^2 2^42 + 2 h l 2^21 + l^2, and each of the three sums fits int64.

    Raises:
        OverflowError: an entry is larger.
    """
    total = 0
    for at in range(0, len(integers), _BLOCK):
        block = integers[at : at + _BLOCK]
        if int(block.max()) > LARGEST or int(block.min()) < -LARGEST:  # before abs: abs(-2^63) overflows to itself
            raise OverflowError(f"an entry is larger than 2^{2 * _LIMB} - 1")
        size = block.abs()
        high, low = size >> _LIMB, size & (2**_LIMB - 1)
        total += int((high * high).sum()) << (2 * _LIMB)
        total += int((high * low).sum()) << (_LIMB + 1)
        total += int((low * low).sum())
    return total


def held(integers: Tensor, bound: int) -> Tensor:
    """The vector, shrunk if its norm exceeds `bound` until it does not, in exact arithmetic.

    |x| becomes floor(|x| bound / N) with N = ceil of its norm, so that the squares sum to at most bound^2.
    """
    squared = squared_norm(integers) if integers.numel() else 0
    if squared <= bound * bound:
        return integers
    over = math.isqrt(squared - 1) + 1
    shrunk = [(abs(x) * bound // over) * (1 if x > 0 else -1) for x in integers.tolist()]
    return torch.tensor(shrunk, dtype=torch.int64)
