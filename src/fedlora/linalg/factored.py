"""The one choice of this package: how a tall matrix becomes Q R.

    X (d, n) = Q R,   Q^T Q = I (k, k),   k = min(d, n)

By Cholesky of the Gram matrix where that is sound, for it reads X once and never forms Q; else by Householder's
reflections, which are sound for any columns. All functions take m matrices of one shape, (m, d, n).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedlora.linalg.basics import norm

# The largest ||R^-1||_F, for columns of norm 1, at which R may come from the Gram matrix. The Gram matrix squares the
# condition: Q = X R^-1 is orthonormal to u64 CONDITION^2 = 1e-8, below the 6e-8 at which float32 stores Q. The product
# Q R is exact at any condition, for R cancels. float64 would show every condition, so float64 columns never come here.
CONDITION = 1e4

# Bytes of one float64 panel of a tall matrix. A panel and its products stay in a core's cache, and the allocator hands
# out the same pages again: casting a whole (4096, 320) factor costs more than its Gram matrix.
PANEL = 2**19

# Columns of a Gram matrix at a time. Wider strips waste the half that symmetry gives; narrower products run below the
# speed of the processor.
STRIP = 64


class Factored(NamedTuple):
    """X = Q R with Q = tall @ small, which is never formed.

    R (m, k, n), float64. Householder: tall is Q (m, d, k), small is None. Gram: tall is X as stored, small is R^-1.
    """

    R: Tensor
    tall: Tensor
    small: Tensor | None

    @property
    def how(self) -> str:
        """For the stats."""
        return "qr" if self.small is None else "gram"

    def inner(self, Y: Tensor) -> Tensor:
        """Z with Q Y = tall @ Z, for Y (m, k, l): one product with the tall matrix for all l columns."""
        return Y if self.small is None else self.small @ Y

    def blocks(self, at: Tensor) -> Factored:
        """Q R of the columns X[:, :, at_i] for each row of at (c, r), in coordinates of Q: R (m, c, r, r), tall
        (m, c, k, r). Their condition is at most that of all columns, so what is sound for X is sound here. One more
        column than X has, n, is zero."""
        own = pad(self.R, (0, 1)).mT[:, at].mT
        if self.small is None:
            Q, R = torch.linalg.qr(own)
            return Factored(R, Q, None)
        R, inverse, _ = cholesky(own.mT @ own)
        return Factored(R, own, inverse)


def factored(X: Tensor) -> Factored | None:
    """Q R of each matrix of X (m, d, n), each by its own data; None if they do not all go the same way."""
    if X.dtype != torch.float64 and X.shape[2] <= X.shape[1]:
        G = gram(X)
        R, inverse, failed = cholesky(G)
        unit_columns = inverse * G.diagonal(dim1=1, dim2=2).sqrt()[:, :, None]
        sound = (failed == 0) & (torch.linalg.matrix_norm(unit_columns) <= CONDITION)  # nan is not sound
        if bool(sound.all()):
            return Factored(R, X, inverse)
        if bool(sound.any()):
            return None
    Q, R = torch.linalg.qr(X.double())
    return Factored(R, Q, None)


def norm_of_product(B: Tensor, A: Tensor) -> float:
    """||B A||_F = ||R_B R_A^T||_F for B (d_out, r), A (r, d_in), in float64. The trace of (B^T B)(A A^T) would lose
    half of the digits in bad gauges."""
    left, right = factored(B[None]), factored(A.mT[None])
    assert left is not None and right is not None, "one matrix always goes one way"
    return float(norm(left.R @ right.R.mT))


def gram(X: Tensor) -> Tensor:
    """X^T X (m, n, n) in float64, by panels of rows and strips of its lower triangle: half of the flops."""
    n = X.shape[2]
    G = X.new_zeros(len(X), n, n, dtype=torch.float64)
    for some, rows in panels(X):
        P = X[some, rows].double()
        for at in range(0, n, STRIP):
            to = at + STRIP  # strips of rows, for BLAS is a fifth slower along narrow columns
            G[some, at:to, :to].baddbmm_(P[:, :, at:to].mT, P[:, :, :to])
    return G.tril_().add_(G.tril(-1).mT) if n > STRIP else G


def cholesky(G: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(R, R^-1, whether it failed) of G = R^T R (*, n, n). Changes the zeros on G's diagonal."""
    diagonal = G.diagonal(dim1=-2, dim2=-1)
    # A zero column, of an idle client, gets R = 0 and Q = 0: nothing ever points there, so it needs no slower way.
    zero = diagonal == 0
    diagonal += zero
    R, failed = torch.linalg.cholesky_ex(G, upper=True)
    eye = torch.eye(R.shape[-1], dtype=R.dtype, device=R.device)
    inverse = torch.linalg.solve_triangular(R, eye.expand_as(R), upper=True)
    return R * ~zero[..., None, :], inverse, failed


def panels(X: Tensor) -> list[tuple[slice, slice]]:
    """Slices of matrices and of rows of X (m, d, n), which are about `PANEL` bytes in float64. The rows depend on one
    matrix's shape alone, and so do its bits."""
    m, d, n = X.shape
    step = max(128, PANEL // (8 * max(n, 1)))
    at_once = max(1, step // max(d, 1))
    return [
        (slice(k, k + at_once), slice(top, min(top + step, d)))
        for k in range(0, m, at_once)
        for top in range(0, d, step)
    ]
