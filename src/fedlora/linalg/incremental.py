"""Consensus for more uploads than fit in memory: what came so far as one pair (M, N) of at most so many columns.

    folded = fold(None, M_1, N_1, columns)        M_i = [sqrt(n_k) U_k], N_i = [sqrt(n_k) Ahat_k] of some clients
    folded = fold(folded, M_2, N_2, columns)      ... of others, and so on; nothing of them is needed afterwards
    folded.M @ folded.N = sum n_k Delta W_k and folded.M folded.M^T = sum n_k U_k U_k^T, while all columns fit

Beyond that the weakest directions of K so far are left out of both: the incremental truncated eigendecomposition of K
(what incremental SVD, Brand 2002, is for a matrix). Good where clients share a subspace, so that the directions that
are left out stay weak. `kept` is what was left out of K, exactly; `lost` bounds what was left out of the sum, with the
rounding of every step: the norms of all steps added up, or twice what 16 random directions see of it, if that is less.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedlora.linalg.basics import gram, unit_roundoff
from fedlora.linalg.gauge import Split
from fedlora.linalg.shapes import Float, Tensor
from fedlora.linalg.stored import stored_bytes
from fedlora.seeds import derive_seed

# What a direction that rounding could have made has of a vote, as a singular value: its square is its share of K.
_TOKEN = 1e-3


@dataclass(frozen=True, eq=False)
class Folded:
    """M (d_out, c) and N (c, d_in) of all clients so far, in the compute dtype.

    trace: sum n_k rank_k, of K, before anything was left out. left_out: how much of it has been. steps: the norms of
    what each step left out of sum n_k Delta W_k, added up, which many steps make a loose bound. seen (d_out, 16),
    float64: what was left out, times random directions; None while nothing was. seed: of these directions, from the
    data that had come when the first were left out, so that no client can aim between them. rounded: a bound of what
    rounding of M and N cost the sum. folds: how often they were rounded.
    """

    M: Tensor
    N: Tensor
    trace: float
    left_out: float = 0.0
    steps: float = 0.0
    seen: Tensor | None = None
    seed: int = 0
    rounded: float = 0.0
    folds: int = 0

    @property
    def lost(self) -> float:
        """An upper bound of the norm of what M N lacks of sum n_k Delta W_k.

        By random directions it is one with a chance of 99.9 % where a single direction was lost (chi-square of 16
        degrees under a quarter of its mean), and beyond doubt where several were.
        """
        if self.seen is None:
            return self.steps + self.rounded
        estimate = float(torch.linalg.vector_norm(self.seen)) / math.sqrt(self.seen.shape[1])
        return min(self.steps, 2 * estimate) + self.rounded

    @property
    def least(self) -> float:
        """What ||sum n_k Delta W_k|| is at least, by the same directions and chance; 0 while all is in M N."""
        if self.seen is None:
            return 0.0
        whole = self.M.double() @ (self.N.double() @ _directions(self.N, self.seed)) + self.seen
        return float(torch.linalg.vector_norm(whole)) / math.sqrt(whole.shape[1]) / 1.6

    @property
    def noise(self) -> float:
        """How much larger the rounding noise in M and N is than in stored factors: it adds up as a random walk."""
        return math.sqrt(max(self.folds, 1))

    @property
    def nbytes(self) -> int:
        """Of M and N; `seen`, 64 bytes a row of M, comes on top."""
        return self.M.nbytes + self.N.nbytes

    @property
    def kept(self) -> float:
        """The share of tr K that M still holds; 1 while everything fits."""
        return 1 - self.left_out / self.trace if self.trace else 1.0


def fold(
    folded: Folded | None,
    M: Float[Tensor, "d_out S"],
    N: Float[Tensor, "S d_in"],
    columns: int,
    *,
    dtype: torch.dtype | None = None,
) -> Folded:
    """`folded` (None: nothing yet) and some more clients, in at most `columns` columns.

    M, N: float64 where nothing shall be lost on the way in. dtype: of what is kept; None: that of M.
    """
    dtype = dtype or M.dtype
    before = folded or Folded(M[:, :0], N[:0], 0.0)
    if folded is not None:
        dtype = torch.promote_types(dtype, folded.M.dtype)
    trace = before.trace + float(M.square().sum(dtype=torch.float64))
    M = torch.cat([before.M.double(), M.double()], dim=1)
    N = torch.cat([before.N.double(), N.double()], dim=0)
    left_out, steps, seen, seed, folds = before.left_out, before.steps, before.seen, before.seed, before.folds
    if M.shape[1] > columns:
        _, s, Vh = torch.linalg.svd(torch.linalg.qr(M, mode="r").R, full_matrices=True)
        s = torch.cat([s, s.new_zeros(len(Vh) - len(s))])
        Z = Vh @ N  # the weakest rows times s go
        steps += float(torch.linalg.vector_norm(s[columns:, None] * Z[columns:]))
        left_out += float(s[columns:].square().sum())
        seed = seed or derive_seed("folding", _digest(M), _digest(N))
        gone = M @ (Vh[columns:].mH @ (Z[columns:] @ _directions(N, seed)))
        seen = gone if seen is None else seen + gone
        M, N, folds = M @ Vh[:columns].mH, Z[:columns], folds + 1
    kept_M, kept_N = M.to(dtype), N.to(dtype)
    if dtype != torch.float64:
        rounded = _product_norm(M - kept_M, N) + _product_norm(kept_M.double(), N - kept_N)
    else:
        sizes = torch.linalg.vector_norm(M, dim=0) * torch.linalg.vector_norm(N, dim=1)
        rounded = 64 * unit_roundoff(dtype) * float(torch.linalg.vector_norm(sizes))
    return Folded(kept_M, kept_N, trace, left_out, steps, seen, seed, before.rounded + rounded, folds)


def side_by_side(splits: Sequence[Split], weights: Sequence[float]) -> tuple[Tensor, Tensor]:
    """M = [sqrt(p_i) U_i] and N = [sqrt(p_i) Ahat_i], float64, and what rounding could have made, with a token vote.

    M N is the whole mean then, and M M^T is K but for a millionth: such directions are kept last, yet they are kept.
    """
    M, N = [], []
    for split, weight in zip(splits, weights, strict=True):
        root = math.sqrt(weight)
        M += [root * split.U, root * _TOKEN * split.U_rest]
        N += [root * split.Ahat, root / _TOKEN * split.A_rest]
    return torch.cat(M, dim=1), torch.cat(N, dim=0)


def _digest(X: Tensor) -> str:
    return hashlib.sha256(stored_bytes(X)).hexdigest()


def _directions(N: Tensor, seed: int) -> Tensor:
    """(d_in, 16) standard normal numbers, the same in every step."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N.shape[1], 16, generator=generator, dtype=torch.float64).to(N.device)


def _product_norm(X: Tensor, Y: Tensor) -> float:
    """||X Y||_F from two Gram matrices: of rounding errors, which do not cancel."""
    return math.sqrt(max(float((gram(X) * gram(Y.mT)).sum()), 0.0))
