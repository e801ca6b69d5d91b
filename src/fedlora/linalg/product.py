"""The SVD of B A for the factors of several clients side by side: the sizes first, the factors once a rank is chosen.

    B = Q_B R_B, A^T = Q_A R_A;   R_B D R_A^T = O S W^T;   the pair of rank k is Q_B O_k S_k^1/2, and A's alike

D holds the weights, so the stored numbers stay as they are: everything between them and the stored result is float64. R
is the Cholesky factor of the Gram matrix, which reads each factor once and needs no Q: B X with the small X = R_B^-1
O_k S_k^1/2. This loses digits with the squared condition of B. If float32 could show that, or B is float64, we use
Householder's QR instead; also if terms cancel, because their columns are nearly dependent.

Source: the thin exact SVD of docs/explanation/methods.md (FLoRIST's core).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedlora.linalg.basics import gram, norm
from fedlora.linalg.shapes import Float, Tensor
from fedlora.linalg.spectrum import Spectrum, cut_by_rounding, require_some, with_canonical_signs

_WORST_CONDITION = 1e3  # of unit columns: orthogonal to 1e-10 then, far below float32's 6e-8


def svd_of_product(
    B: Float[Tensor, "d_out S"],
    A: Float[Tensor, "S d_in"],
    *,
    tolerance: float | Float[Tensor, " S"],
    dtype: torch.dtype | None = None,
) -> Spectrum:
    """The SVD of B @ A, as a `product` of one pair. dtype: of the result; None: that of B and A."""
    return product([B], [A], [1.0], tolerance=tolerance, dtype=dtype or B.dtype).spectrum()


@dataclass(frozen=True, eq=False)
class _Side:
    """One factor as X (d, n) = Q R; Q is never formed if R has a safe inverse."""

    X: Tensor
    R: Tensor
    Q: Tensor | None

    def times(self, small: Tensor) -> Tensor:
        """Q @ small (n, k), in float64."""
        if self.Q is not None:
            return self.Q @ small
        inner: Tensor = torch.linalg.solve_triangular(self.R, small, upper=True)
        return self.X.double() @ inner


@dataclass(frozen=True, eq=False)
class Product:
    """A weighted sum of products in energy order: `s` descending, and balanced factors of any rank up to `len(s)`.

    noise, rounding: as in `Spectrum`. terms: the norm of the sizes of all terms, before any cancel.
    """

    s: tuple[float, ...]
    noise: float
    rounding: float
    terms: float
    _left: _Side
    _right: _Side
    _O: Tensor
    _W: Tensor
    _dtype: torch.dtype

    @property
    def rank(self) -> int:
        return len(self.s)

    def rank_of_energy(self, share: float) -> int:
        """The least number of leading components whose squares make up `share` of all squares."""
        s = torch.tensor(self.s, dtype=torch.float64)
        return Spectrum(s[None, :], s, s[:, None]).rank_of_energy(share)

    def spectrum(self) -> Spectrum:
        """All components, with canonical signs."""
        s = torch.tensor(self.s, dtype=torch.float64).to(self._O.device, self._dtype)
        U, V = (side.times(small).to(self._dtype) for side, small in ((self._left, self._O), (self._right, self._W)))
        return with_canonical_signs(U, s, V.mT, self.noise, self.rounding)

    def balanced(self, rank: int) -> tuple[Tensor, Tensor]:
        """(B, A) of the `rank` strongest components, with sqrt(s) on both; canonical signs."""
        root = torch.tensor(self.s[:rank], dtype=torch.float64).sqrt().to(self._O)
        B = self._left.times(self._O[:, :rank] * root)
        A = self._right.times(self._W[:, :rank] * root)
        if rank:
            sign = torch.where(B.amax(dim=0) >= -B.amin(dim=0), 1.0, -1.0).to(B)
            B, A = B.mul_(sign), A.mul_(sign)
        return B.to(self._dtype), A.mT.to(self._dtype).contiguous()


def product(
    Bs: Sequence[Tensor],
    As: Sequence[Tensor],
    weights: Sequence[float],
    *,
    tolerance: float | Float[Tensor, " S"],
    dtype: torch.dtype,
) -> Product:
    """sum_i w_i B_i A_i, decomposed.

    Args:
        Bs: (d_out, r_i). As: (r_i, d_in). Any floating types; computed in float64.
        tolerance: relative rounding noise of the stored factors, one for all columns or one for each; it sets
            `Spectrum.noise` and drops nothing. dtype: of the result.

    Returns:
        every component but a tail that `dtype` cannot tell from zero; none if the terms cancel exactly.

    Raises:
        LostUpdate: the sum is not zero, but `dtype` would store zero. OverflowError: `dtype` cannot hold the sum.
    """
    exact = any(t.dtype == torch.float64 for t in (*Bs, *As))
    left, right = _side(Bs, exact), _side([A.mT for A in As], exact)
    scales = [w for B, w in zip(Bs, weights, strict=True) for _ in range(B.shape[1])]
    D = torch.tensor(scales, dtype=torch.float64).to(left.R)
    core = (left.R * D) @ right.R.mT
    if not bool(torch.isfinite(core).all()):
        raise OverflowError("float64 holds up to 1.8e308")
    O, s, Wh = torch.linalg.svd(core, full_matrices=False)
    if len(s) and float(s[0]) > torch.finfo(dtype).max:
        raise OverflowError(f"its norm is {float(s[0]):.1e}")
    sizes = norm(left.R, dim=0) * D.abs() * norm(right.R, dim=0)
    require_some(s, dtype)
    terms, stored = float(norm(sizes)), float(norm(sizes * tolerance))
    keep, noise, rounding = cut_by_rounding(s.tolist(), terms=terms, stored=stored, stored_in=dtype)
    values = tuple(s[:keep].tolist())
    return Product(values, noise, rounding, terms, left, right, O[:, :keep], Wh[:keep].mT, dtype)


def _side(parts: Sequence[Tensor], exact: bool) -> _Side:
    """[X_1 | X_2 | ...] and its R."""
    width = sum(part.shape[1] for part in parts)
    X = parts[0].new_empty(parts[0].shape[0], width, dtype=torch.float64 if exact else torch.float32)
    at = 0
    for part in parts:
        X[:, at : at + part.shape[1]].copy_(part)
        at += part.shape[1]
    if not exact and 0 < width <= X.shape[0]:
        R = _cholesky(gram(X))
        if R is not None:
            return _Side(X, R, None)
    Q, R = torch.linalg.qr(X.double())
    return _Side(X, R, Q)


def _cholesky(G: Tensor) -> Tensor | None:
    """R with R^T R = G; None if that would lose digits, for columns that are nearly dependent or zero."""
    norms = G.diagonal().sqrt()
    if not bool((norms > 0).all()) or not math.isfinite(float(norms.max())):
        return None
    R, failed = torch.linalg.cholesky_ex((G / norms / norms[:, None]), upper=True)
    if bool(failed):
        return None
    inverse = torch.linalg.solve_triangular(R, torch.eye(len(R)).to(R), upper=True)
    if float(torch.linalg.matrix_norm(inverse)) > _WORST_CONDITION:  # for unit columns ||R|| is at most sqrt(n)
        return None
    found: Tensor = R * norms
    return found
