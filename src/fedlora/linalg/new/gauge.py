"""What one client's factors mean: the subspace U_i of its update that no gauge changes, with its revealed rank.

    B A = (B Q)(Q^-1 A) for any invertible Q;     col(B A) is the same for all of them

Only here does a tolerance decide anything: which directions of a client have a vote in the consensus. It never removes
part of the clients' mean.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from .basics import float64s, rank_tolerance
from .factored import factored
from .stacks import in_stacks, stacked

Pair = tuple[Tensor, Tensor, float]  # B (d_out, r), A (r, d_in), and the roundoff with which they were stored


def gauge(B: Tensor, A: Tensor, roundoff: float) -> Tensor:
    """An orthonormal basis U (d_out, k) of col(B A), float64: the left singular vectors of B A, largest first.

    k <= r is the rank of B A beyond rounding; 0 for a zero update. A direction counts if its singular value exceeds
    what rounding of the stored columns can make of it, u ||(||b_j|| ||a_j||)_j||. So a direction of col(B) that A never
    uses is none, and a diagonal gauge changes nothing. Rounding reaches 0.4 of it, for deficient factors in gauges of
    condition 1e3.

    Source: paper section 4.1, Eq. (gauge fixing), with its footnote: a rank-deficient B gives rank(B) columns. A plain
    QR would add arbitrary columns, which would enter the consensus with full weight.
    """
    return gauges([(B, A, roundoff)])[0]


def gauges(pairs: Sequence[Pair]) -> list[Tensor]:
    """[gauge(B, A, u)]. Each depends on that client's pair alone, whoever else takes part."""
    return in_stacks(_subspaces, pairs, _kind)


def _kind(pair: Pair) -> tuple[Hashable, int]:
    B, A, _ = pair
    return (B.shape, A.shape, B.dtype, A.dtype, B.device), 8 * max(B.numel(), A.numel())


def _subspaces(stack: list[Pair]) -> list[Tensor] | None:
    B, A, roundoffs = zip(*stack, strict=True)
    left, right = factored(stacked(B)), factored(stacked(A).mT)
    if left is None or right is None:
        return None
    O, s, _ = torch.linalg.svd(left.R @ right.R.mT, full_matrices=False)
    sizes = torch.linalg.vector_norm(left.R, dim=1) * torch.linalg.vector_norm(right.R, dim=1)
    noise = float64s([rank_tolerance(u) for u in roundoffs], s) * torch.linalg.vector_norm(sizes, dim=1)
    ranks = (s > noise[:, None]).sum(dim=1).tolist()
    U = left.tall.double() @ left.inner(O)
    return [basis[:, :k] for basis, k in zip(U, ranks, strict=True)]
