"""How far the terms b_j a_j of an update B A cancel: their sizes added up, beside the size of what they add up to.

    terms = sum_j ||b_j|| ||a_j||,        cancels = terms / ||B A||

1 to r where columns stand at right angles, and without bound in bad coordinates, or where somebody wants it so. What a
number format leaves of such columns is a share of `terms`, which may be any number of times ||B A||.
"""

from __future__ import annotations

import math

import torch

from fedlora.linalg.basics import norm, unit_roundoff
from fedlora.linalg.shapes import Tensor
from fedlora.linalg.shortest import shortest

# What float64 leaves of a sum, relative to its terms: what is below that is nothing.
ARITHMETIC = 64 * unit_roundoff(torch.float64)


def may_cancel(B: Tensor, A: Tensor, times: float = 100.0) -> tuple[bool, float]:
    """(whether `terms` may be more than `times` ||B A||, ||B A|| where it is not), from r x r Gram matrices in the
    factors' own dtype, float32 at least. Never False where it is so, for `times` up to 300. Cost: r^2 (d_out + d_in).
    """
    wide = torch.promote_types(torch.promote_types(B.dtype, A.dtype), torch.float32)
    B, A = B.detach().to(wide), A.detach().to(wide)
    of_B, of_A = B.mT @ B, A @ A.mT
    terms = float((of_B.diagonal() * of_A.diagonal()).sqrt().sum(dtype=torch.float64))
    square = float((of_B * of_A).sum(dtype=torch.float64))
    if terms == 0 and not (bool(B.any()) and bool(A.any())):
        return False, 0.0
    if not 1e-15 < terms < 1e15:  # squares of such sizes are no numbers of float32, or round to none
        return True, 0.0
    return square * times**2 <= terms**2, math.sqrt(max(square, 0.0))


def terms_and_size(B: Tensor, A: Tensor) -> tuple[float, float]:
    """(sum_j ||b_j|| ||a_j||, ||B A||), of any sizes, in float64: the second from orthogonal columns (`shortest`)."""
    terms = float((norm(B.detach(), dim=0) * norm(A.detach(), dim=1)).sum())
    left, right = shortest([(1.0, B, A)])
    return terms, float(norm(norm(left, dim=0) * norm(right, dim=1)))
