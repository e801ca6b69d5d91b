"""What one client's factors mean: the subspace U_i of its update that no gauge changes, with its revealed rank.

    B A = (B Q)(Q^-1 A) for any invertible Q;     col(B A) is the same for all of them

Only here does a tolerance decide anything: which directions of a client have a vote in the consensus. It never removes
part of the clients' mean.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedlora.linalg.factored import Factored


class Subspace(NamedTuple):
    """An orthonormal basis of one client's col(B_i A_i) in each of m matrices. Of its r columns the first k count, the
    rank beyond rounding (0 for a zero update); the others are zero.

    coordinates (m, k, r): U_i = Q coordinates, with the Q of all clients' columns. inner (m, r, r): U_i = B_i inner,
    where that is sound, for it costs a product of r columns instead of k. columns: B_i's among all. ranks: k of each.
    """

    coordinates: Tensor
    inner: Tensor | None
    columns: slice
    ranks: list[int]


def subspaces(left: Factored, right: Factored, at: Tensor, tolerance: Tensor) -> list[Subspace]:
    """The clients' bases, from the Q R of all their columns, so that no tall matrix is read again.

    A direction counts if its singular value exceeds what rounding of the stored columns can make of it, tolerance
    ||(||b_j|| ||a_j||)_j||. So a direction of col(B) that A never uses is none, and a diagonal gauge changes nothing.
    Rounding reaches 0.4 of it, for deficient factors in gauges of condition 1e3.

    Args:
        left, right: of the columns of B and the rows of A. at: (c, r), each client's columns, which are neighbours.
        tolerance: (m, c), see `rank_tolerance`.

    Source: paper section 4.1, Eq. (gauge fixing), with its footnote: a rank-deficient B gives rank(B) columns. A plain
    QR would add arbitrary columns, which would enter the consensus with full weight.
    """
    B, A = left.blocks(at), right.blocks(at)
    core = B.R @ A.R.mT
    sizes = torch.linalg.vector_norm(B.R, dim=2) * torch.linalg.vector_norm(A.R, dim=2)
    noise = tolerance * torch.linalg.vector_norm(sizes, dim=2)
    ranks = (torch.linalg.svdvals(core) > noise[:, :, None]).sum(dim=2)
    full = core.shape[2]
    turn = torch.eye(full, dtype=core.dtype, device=core.device)
    if bool((ranks < full).any()):  # of full rank any basis of col(B) will do, and the client's own costs nothing
        counts = torch.arange(full, device=core.device) < ranks[:, :, None, None]
        turn = torch.where((ranks < full)[:, :, None, None], torch.linalg.svd(core)[0] * counts, turn)
    inner = B.inner(turn.expand(*core.shape[:2], full, full))
    coordinates = B.tall @ inner
    return [
        Subspace(
            coordinates[:, i],
            None if B.small is None else inner[:, i],
            slice(int(columns[0]), int(columns[-1]) + 1) if len(columns) else slice(0),
            ranks[:, i].tolist(),
        )
        for i, columns in enumerate(at)
    ]
