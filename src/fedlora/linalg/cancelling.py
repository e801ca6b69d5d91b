"""How far the terms b_j a_j of an update B A cancel: the sum of their sizes, next to the size of their sum.

    terms = sum_j ||b_j|| ||a_j||,        cancels = terms / ||B A||

1 to r for orthogonal columns; unbounded in bad coordinates, or if a client wants it so. A number format rounds such
columns by a share of `terms`, which may be any multiple of ||B A||.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch

from fedlora.linalg.basics import norm, unit_roundoff
from fedlora.linalg.batches import in_batches, stacked
from fedlora.linalg.parallel import Each, one_by_one
from fedlora.linalg.shapes import Tensor
from fedlora.linalg.shortest import shortest

# The rounding of a float64 sum, relative to its terms: anything smaller counts as zero.
ARITHMETIC = 64 * unit_roundoff(torch.float64)


def may_cancel(
    pairs: Sequence[tuple[Tensor, Tensor]], times: float = 100.0, each: Each = one_by_one
) -> list[tuple[bool, float]]:
    """For each pair (whether `terms` may exceed `times` ||B A||, ||B A|| if not), from r x r Gram matrices in the
    factors' own dtype, at least float32. Never a wrong False, for `times` up to 300. Cost: r^2 (d_out + d_in), pairs of
    one shape at once.
    """
    kinds = [(B.shape, A.shape, B.dtype, A.dtype, B.device) for B, A in pairs]
    return in_batches(partial(_measured, pairs, times), kinds, [8 * max(B.numel(), A.numel()) for B, A in pairs], each)


def _measured(pairs: Sequence[tuple[Tensor, Tensor]], times: float, members: list[int]) -> list[tuple[bool, float]]:
    """`may_cancel` of the pairs at `members`, which have the same shapes and dtypes."""
    B, A = (stacked([pairs[k][side].detach() for k in members]) for side in (0, 1))
    wide = torch.promote_types(torch.promote_types(B.dtype, A.dtype), torch.float32)
    B, A = B.to(wide), A.to(wide)
    of_B, of_A = B.mT @ B, A @ A.mT
    lengths = (of_B.diagonal(dim1=1, dim2=2) * of_A.diagonal(dim1=1, dim2=2)).sqrt()
    terms, squares = lengths.sum(dim=1, dtype=torch.float64), (of_B * of_A).sum(dim=(1, 2), dtype=torch.float64)
    found = []
    for k, size, square in zip(members, terms.tolist(), squares.tolist(), strict=True):
        if size == 0 and not all(bool(t.any()) for t in pairs[k]):
            found.append((False, 0.0))
        elif not 1e-15 < size < 1e15:  # squares of such sizes overflow or underflow float32
            found.append((True, 0.0))
        else:
            found.append((square * times**2 <= size**2, math.sqrt(max(square, 0.0))))
    return found


def terms_and_size(B: Tensor, A: Tensor) -> tuple[float, float]:
    """(sum_j ||b_j|| ||a_j||, ||B A||), for any sizes, in float64: the second from orthogonal columns (`shortest`). The
    first is 0 only if every term is: one that underflows counts as the smallest number."""
    of_B, of_A = norm(B.detach(), dim=0), norm(A.detach(), dim=1)
    terms = float(torch.where((of_B > 0) & (of_A > 0), (of_B * of_A).clamp(min=5e-324), 0.0).sum())
    left, right = shortest([(1.0, B, A)])
    return terms, float(norm(norm(left, dim=0) * norm(right, dim=1)))
