"""The fast path of GLoRA's aggregation. What it must equal stands in `linalg`, written to be read:

    here                            reference in `linalg`           the difference
    gauge_fix_all(pairs)            gauge_fix, pair by pair         equal shapes at once, from Gram matrices
    consensus_spectrum(M, N, R)     consensus_spectrum(M, N, R)     fewer passes over M and N, no QR

Four tall products cannot be avoided: two Gram matrices in float64, which say everything about M N, then U_s and V^T.
All between them is S x S, S = sum r_i. Where nothing is cut any orthonormal basis of the whole range does, so a
Cholesky factor of M^T M takes the place of its eigenvectors; and where S exceeds d_out the mean update itself is the
smallest thing there is. What is not ordinary - float64, badly conditioned, deficient in a way that a Gram matrix cannot
tell from noise - goes to the reference. tests/test_fastpath.py compares the two on every hard family,
benchmarks/aggregation.py measures both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlora import linalg
from fedlora.linalg import (
    Canonical,
    ConsensusSpectrum,
    Spectrum,
    Tie,
    cut_at,
    gauge_fix,
    gram,
    right_svd,
    with_canonical_signs,
)
from fedlora.shapes import Float

# The least lambda / lambda_1 of K among the kept directions. A basis M X made from a Gram matrix is orthonormal up to
# the roundoff of the product over the square root of this (6e-6 in float32), and up to 1e-16 over it (1e-7 in float64).
_LEAST_IN_FLOAT32, _LEAST_IN_FLOAT64 = 1e-4, 1e-9


def consensus_spectrum(
    M: Float[Tensor, "d_out S"],
    N: Float[Tensor, "S d_in"],
    R: int,
    *,
    tolerance: float,
    tie_tolerance: float,
    tie: Tie = "energy",
) -> ConsensusSpectrum:
    """`linalg.consensus_spectrum`, faster."""
    noise = tolerance * float(torch.linalg.vector_norm(N, dtype=torch.float64))
    (d_out, S), d_in = M.shape, N.shape[1]
    made = None
    if M.dtype != torch.float64 and S > 0:
        if min(S, d_out) <= R and min(d_out, d_in) <= S:
            made = _of_the_mean(M, N, noise)
        elif S <= R:
            made = _uncut(M, N, noise)
        made = made or _cut(M, N, R, noise, tolerance, tie_tolerance, tie)
    return made or linalg.consensus_spectrum(M, N, R, tolerance=tolerance, tie_tolerance=tie_tolerance, tie=tie)


def _of_the_mean(M: Tensor, N: Tensor, noise: float) -> ConsensusSpectrum:
    """Nothing is cut, and the mean update (d_out x d_in) is no larger than M and N: its SVD from its smaller side."""
    mean = M @ N
    wide = mean.shape[0] <= mean.shape[1]
    s, near = right_svd(mean.mT if wide else mean)
    rank = int((s > noise).sum())
    s, near = s[:rank], near[:, :rank]
    far = (near / s).to(mean)
    U, Vh = (near.to(mean), far.mT @ mean) if wide else (mean @ far, near.mT.to(mean))
    return ConsensusSpectrum(with_canonical_signs(U, s.to(mean), Vh), None, math.inf, False, 1.0)


def _uncut(M: Tensor, N: Tensor, noise: float) -> ConsensusSpectrum | None:
    """Nothing is cut: M N = (M L^-T)(L^T N) with M^T M = L L^T. None where M is near to losing rank."""
    L, failed = torch.linalg.cholesky_ex(gram(M.double()))
    pivots = L.diagonal().square()
    if int(failed) or not float(pivots.min()) >= _LEAST_IN_FLOAT32 * float(pivots.max()):
        return None
    rotation = _rotation(L, N, noise)
    left = torch.linalg.solve_triangular(L.mT, rotation.O, upper=True)
    return ConsensusSpectrum(rotation.spectrum(M @ left.to(M)), M.shape[1], math.inf, False, 1.0)


def _cut(
    M: Tensor, N: Tensor, R: int, noise: float, tolerance: float, tie_tolerance: float, tie: Tie
) -> ConsensusSpectrum | None:
    """The general case. None where the kept directions come too near to noise."""
    thin = M.shape[1] <= M.shape[0]
    if thin:  # U_ref = M left, Z = right^T N
        G = gram(M.double())
        eigenvalues, V = torch.linalg.eigh(G)
        s_M, V = eigenvalues.flip(0).clamp(min=0).sqrt(), V.flip(1)
        left, right = V / s_M, V * s_M
    else:  # U_ref = left, Z = right^T (M N): K and the mean are the smaller ones
        s_M, left = right_svd(M.mT)
        right, N = left, M @ N
    union = int((s_M > tolerance * float(s_M[0])).sum())
    at = cut_at(s_M[:union].square(), right, N, R, tie_tolerance=tie_tolerance, tie=tie)
    least = float(s_M[at.keep - 1] / s_M[0]) ** 2 if at.keep else 1.0
    if thin and least < _LEAST_IN_FLOAT64:
        return None
    rotation = _rotation(at.turn(right), N, noise)
    left = at.turn(left) @ rotation.O
    if thin:
        left = M @ left.to(M) if least >= _LEAST_IN_FLOAT32 else M.double() @ left
    captured = 1.0
    if at.keep < union:
        energy = float(((G * gram(N.mT)) if thin else N.square()).sum(dtype=torch.float64))  # ||M N||^2
        captured = min(rotation.energy / energy, 1.0) if energy else 1.0
    return ConsensusSpectrum(rotation.spectrum(left.to(M)), union, at.gap, at.tied, captured)


@dataclass(frozen=True, eq=False)
class _Rotation:
    """Z = O diag(s) Vh for the coordinates Z = right^T N; energy: ||Z||^2."""

    O: Tensor
    s: Tensor
    Vh: Tensor
    energy: float

    def spectrum(self, U: Tensor) -> Spectrum:
        return with_canonical_signs(U, self.s.to(U), self.Vh)


def _rotation(right: Tensor, N: Tensor, noise: float) -> _Rotation:
    """The SVD of Z = right^T N. Where Z is nearly as large as N it is not formed: N N^T says as much."""
    if 2 * right.shape[1] > right.shape[0]:
        ZZ, rows, back = right.mT @ gram(N.double().mT) @ right, N, right
    else:
        rows = right.mT.to(N) @ N
        ZZ, back = gram(rows.double().mT), None
    eigenvalues, O = torch.linalg.eigh(ZZ)
    s = eigenvalues.flip(0).clamp(min=0).sqrt()
    rank = int((s > noise).sum())
    s, O = s[:rank], O.flip(1)[:, :rank]
    to_rows = O / s if back is None else back @ (O / s)
    return _Rotation(O, s, to_rows.mT.to(N) @ rows, float(eigenvalues.sum()))


def gauge_fix_all(
    pairs: Sequence[tuple[Tensor, Tensor]],
    *,
    tolerances: Sequence[float],
    canonical: Canonical = "product",
    dtype: torch.dtype = torch.float64,
) -> list[tuple[Tensor, Tensor]]:
    """[gauge_fix(B, A, ...) for each pair], the ordinary ones of one shape at once and from Gram matrices.

    Ordinary: float32, and well enough conditioned after column scaling that a float64 Gram matrix gives the same span
    to 1e-9. Whatever is not - deficient, badly conditioned, float64 - goes through `gauge_fix` itself. dtype: of the
    results; all is computed in float64.
    """
    alike: dict[tuple[torch.Size, torch.Size, torch.dtype], list[int]] = {}
    for k, (B, A) in enumerate(pairs):
        alike.setdefault((B.shape, A.shape, torch.promote_types(B.dtype, A.dtype)), []).append(k)
    fixed: dict[int, tuple[Tensor, Tensor]] = {}
    for (shape, _, stored), members in alike.items():
        if stored != torch.float64 and 0 < shape[1] <= shape[0]:
            found = _gauge_fix_alike([pairs[k] for k in members], [tolerances[k] for k in members], dtype)
            fixed |= {k: pair for k, pair in zip(members, found, strict=True) if pair is not None}
    for k, (B, A) in enumerate(pairs):
        if k not in fixed:
            U, Ahat = gauge_fix(B, A, tolerance=tolerances[k], canonical=canonical)
            fixed[k] = (U.to(dtype), Ahat.to(dtype))
    return [fixed[k] for k in range(len(pairs))]


def _gauge_fix_alike(
    pairs: Sequence[tuple[Tensor, Tensor]], tolerances: Sequence[float], dtype: torch.dtype
) -> list[tuple[Tensor, Tensor] | None]:
    """(U, Ahat) of pairs of one shape, None for those that are not ordinary."""
    B = torch.stack([B for B, _ in pairs]).double()
    A = torch.stack([A for _, A in pairs]).double()
    G = B.mT @ B
    norms = G.diagonal(dim1=1, dim2=2).sqrt()
    # The column scales D are powers of two, so exact wherever they act. A zero column keeps scale 1: not ordinary.
    D = torch.exp2(-torch.floor(torch.log2(norms.masked_fill(norms == 0, 1.0))))
    eigenvalues, V = torch.linalg.eigh(D[:, :, None] * G * D[:, None, :])
    s = eigenvalues.clamp(min=0).sqrt()
    T = s[:, :, None] * V.mT / D[:, None, :]
    Ahat = T @ A
    sizes = torch.linalg.eigvalsh(Ahat @ Ahat.mT).clamp(min=0).sqrt()
    noise = torch.linalg.vector_norm(T.abs() @ torch.linalg.vector_norm(A, dim=2, keepdim=True), dim=(1, 2))
    tolerance = torch.tensor(tolerances, dtype=torch.float64, device=B.device)
    # Four digits above round-off in both Grams, and above the noise of the stored factors.
    sound = (s[:, 0] > 1e-3 * s[:, -1]) & (sizes[:, 0] > 1e-6 * sizes[:, -1])
    sound &= (s[:, 0] > tolerance * torch.linalg.vector_norm(s, dim=1)) & (sizes[:, 0] > tolerance * noise)
    U, Ahat = (B @ (D[:, :, None] * V / s[:, None, :])).to(dtype), Ahat.to(dtype)
    return [(U[i], Ahat[i]) if ok else None for i, ok in enumerate(sound.tolist())]
