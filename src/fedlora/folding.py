"""Consensus for more uploads than fit in memory: what came so far as one pair (M, N) of at most so many columns.

    folded = fold(None, M_1, N_1, columns)        M_i = [sqrt(n_k) U_k], N_i = [sqrt(n_k) Ahat_k] of some clients
    folded = fold(folded, M_2, N_2, columns)      ... of others, and so on; nothing of them is needed afterwards
    folded.M @ folded.N = sum n_k Delta W_k and folded.M folded.M^T = sum n_k U_k U_k^T, while all columns fit

Beyond that the weakest directions of K so far are left out of both: the incremental truncated eigendecomposition of K
(what incremental SVD, Brand 2002, is for a matrix). Good where clients share a subspace, so that the directions that
are left out stay weak. `kept` and `lost` say how good: exact numbers of what was left out, not estimates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fedlora.linalg import right_svd
from fedlora.shapes import Float, Tensor


@dataclass(frozen=True, eq=False)
class Folded:
    """M (d_out, c) and N (c, d_in) of all clients so far, in the compute dtype.

    trace: sum n_k rank_k, of K, before anything was left out. left_out: how much of it has been. lost: an upper bound
    of the norm of what was left out of sum n_k Delta W_k, the sum of the norms of what each step left out. folds: how
    often M and N were rounded on the way.
    """

    M: Tensor
    N: Tensor
    trace: float
    left_out: float = 0.0
    lost: float = 0.0
    folds: int = 0

    @property
    def noise(self) -> float:
        """How much larger the rounding noise in M and N is than in stored factors: it adds up as a random walk."""
        return math.sqrt(max(self.folds, 1))

    @property
    def nbytes(self) -> int:
        return self.M.nbytes + self.N.nbytes

    @property
    def kept(self) -> float:
        """The share of tr K that M still holds; 1 while everything fits."""
        return 1 - self.left_out / self.trace if self.trace else 1.0


def fold(folded: Folded | None, M: Float[Tensor, "d_out S"], N: Float[Tensor, "S d_in"], columns: int) -> Folded:
    """`folded` (None: nothing yet) and some more clients, in at most `columns` columns."""
    trace = float(M.square().sum(dtype=torch.float64))
    left_out, lost, folds = 0.0, 0.0, 0
    if folded is not None:
        M, N = torch.cat([folded.M, M], dim=1), torch.cat([folded.N, N], dim=0)
        trace, left_out, lost, folds = trace + folded.trace, folded.left_out, folded.lost, folded.folds
    if M.shape[1] > columns:
        s, V = right_svd(M)
        keep, weak = V[:, :columns].to(M), V[:, columns:].to(M)
        lost += _norm(s[columns:], weak, N)
        left_out += float(s[columns:].square().sum())
        M, N, folds = M @ keep, keep.mT @ N, folds + 1
    return Folded(M, N, trace, left_out, lost, folds)


def _norm(s: Tensor, V: Tensor, N: Tensor) -> float:
    """||W diag(s) V^T N||_F for an orthonormal W."""
    return float(torch.linalg.vector_norm(s.to(N)[:, None] * (V.mT @ N), dtype=torch.float64))
