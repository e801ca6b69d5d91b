"""The fast path of GLoRA's aggregation. What it must equal stands in `linalg`, written to be read:

    here                            reference in `linalg`                   the difference
    gauge_fix_all(pairs)            gauge_fix, pair by pair                 equal shapes at once, from Gram matrices
    consensus_spectrum(M, N, R)     consensus_spectrum(M, N, R)             fewer passes over M and N, no QR
    whole_mean.whole_means          both, one after the other, R >= S       M and N are never made

Four tall products cannot be avoided: two Gram matrices in float64, which say everything about the mean, then U_s and
V^T. All between them is S x S, S = sum r_i. Where nothing is cut any orthonormal basis of the whole range does, so a
Cholesky factor of a Gram matrix takes the place of eigenvectors, and no client's gauge has to be fixed before the sum;
and where S exceeds d_out the mean update itself is the smallest thing there is. What is not ordinary - float64, badly
conditioned, deficient in a way that a Gram matrix cannot tell from noise - goes one row up in the table, and in the end
to the reference. tests/test_fastpath.py compares them on every hard family, benchmarks/aggregation.py measures all.
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
    eigh,
    gauge_fix,
    gram,
    right_svd,
    with_canonical_signs,
)
from fedlora.shapes import Float

# The least lambda / lambda_1 of K among the kept directions. A basis M X made from a Gram matrix is orthonormal up to
# the roundoff of the product over the square root of this (6e-6 in float32), and up to 1e-16 over it (1e-7 in float64).
LEAST_IN_FLOAT32, _LEAST_IN_FLOAT64 = 1e-4, 1e-9

# Bytes of one factor of a batch in float64, so that a batch and what is made of it stay in a core's cache.
CACHED = 2**20


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
            made = _uncut(M, N, noise, tolerance)
        made = made or _cut(M, N, R, noise, tolerance, tie_tolerance, tie)
    return made or linalg.consensus_spectrum(M, N, R, tolerance=tolerance, tie_tolerance=tie_tolerance, tie=tie)


def _of_the_mean(M: Tensor, N: Tensor, noise: float) -> ConsensusSpectrum | None:
    """Nothing is cut, and the mean update (d_out x d_in) is no larger than M and N: its own SVD.

    Of a long one from its smaller side, several times faster. The other side is made from this one, and loses
    orthonormality as the least singular value comes near to round-off: it is made in float64 then, and where that is
    not enough the answer is None.
    """
    mean = M @ N
    if max(mean.shape) < 2 * min(mean.shape):
        U, s, Vh = torch.linalg.svd(mean, full_matrices=False)
        rank = int((s > noise).sum())
        spectrum = with_canonical_signs(U[:, :rank].contiguous(), s[:rank], Vh[:rank])
        return ConsensusSpectrum(spectrum, None, math.inf, False, 1.0)
    wide = mean.shape[0] <= mean.shape[1]
    s, near = right_svd(mean.mT if wide else mean)
    rank = int((s > noise).sum())
    s, near = s[:rank], near[:, :rank]
    least = float(s[-1] / s[0]) if rank else 1.0
    if least < 1e-5:
        return None
    exact = mean if least > LEAST_IN_FLOAT32**0.5 else mean.double()
    far = (near / s).to(exact)
    U, Vh = (near, far.mT @ exact) if wide else (exact @ far, near.mT)
    return ConsensusSpectrum(with_canonical_signs(U.to(mean), s.to(mean), Vh.to(mean)), None, math.inf, False, 1.0)


def _uncut(M: Tensor, N: Tensor, noise: float, tolerance: float) -> ConsensusSpectrum | None:
    """Nothing is cut: M N = (M L^-T)(L^T N) with M^T M = L L^T. None where M is near to losing rank."""
    L, failed = torch.linalg.cholesky_ex(gram(M))
    pivots, size = L.diagonal(), float(torch.linalg.vector_norm(L))
    if int(failed) or not float(pivots.min()) >= max(LEAST_IN_FLOAT32**0.5 * float(pivots.max()), 4 * tolerance * size):
        return None
    rotation = _rotation(L, N, noise)
    left = torch.linalg.solve_triangular(L.mT, rotation.O, upper=True)
    return ConsensusSpectrum(
        rotation.spectrum(M @ left.to(M)), M.shape[1], math.inf, False, 1.0, (L @ rotation.O).square()
    )


def _cut(
    M: Tensor, N: Tensor, R: int, noise: float, tolerance: float, tie_tolerance: float, tie: Tie
) -> ConsensusSpectrum | None:
    """The general case. None where the kept directions come too near to noise."""
    thin = M.shape[1] <= M.shape[0]
    if thin:  # U_ref = M left, Z = right^T N
        G = gram(M)
        eigenvalues, V = eigh(G)
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
    right = at.turn(right)
    rotation = _rotation(right, N, noise)
    alignment = (right @ rotation.O).square() if thin else None  # M^T U_s = V s^2 V^T (V / s) O
    if thin:
        left = at.turn(left) @ rotation.O
        left = M @ left.to(M) if least >= LEAST_IN_FLOAT32 else M.double() @ left
    else:
        left = at.turn(left).to(M) @ rotation.O.to(M)
    captured = 1.0
    if at.keep < union:
        energy = _energy(G, N) if thin else float(N.square().sum(dtype=torch.float64))  # ||M N||^2
        captured = min(max(rotation.energy / energy, 0.0), 1.0) if energy > 0 else 1.0
    return ConsensusSpectrum(rotation.spectrum(left.to(M)), union, at.gap, at.tied, captured, alignment)


def _energy(G: Tensor, N: Tensor) -> float:
    """||M N||_F^2 = <M^T M, N N^T>: from float32 products, or from float64 where clients cancel."""
    for dtype in (torch.float32, torch.float64):
        NN = gram(N.mT, dtype).double()
        energy = float((G * NN).sum())
        if energy > 1e-3 * float(torch.linalg.vector_norm(G) * torch.linalg.vector_norm(NN)):
            break
    return energy


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
    """The SVD of Z = right^T N. Where Z is nearly as large as N, and both are long, it is not formed: N N^T says as
    much.
    """
    if 2 * right.shape[1] > right.shape[0] and 4 * right.shape[0] <= N.shape[1]:
        ZZ, rows, back = right.mT @ gram(N.mT) @ right, N, right
    else:
        rows = right.mT.to(N) @ N
        ZZ, back = gram(rows.mT), None
    eigenvalues, O = eigh(ZZ)
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
    alike: dict[tuple[torch.Size, torch.Size, torch.dtype, float], list[int]] = {}
    for k, (B, A) in enumerate(pairs):
        alike.setdefault((B.shape, A.shape, torch.promote_types(B.dtype, A.dtype), tolerances[k]), []).append(k)
    fixed: dict[int, tuple[Tensor, Tensor]] = {}
    for (shape, _, stored, tolerance), members in alike.items():
        if stored != torch.float64 and 0 < shape[1] <= shape[0]:
            at_once = max(1, CACHED // (8 * pairs[members[0]][0].numel()))
            for first in range(0, len(members), at_once):
                some = members[first : first + at_once]
                found = _gauge_fix_alike([pairs[k] for k in some], tolerance, dtype)
                fixed |= {k: pair for k, pair in zip(some, found, strict=True) if pair is not None}
    for k, (B, A) in enumerate(pairs):
        if k not in fixed:
            U, Ahat = gauge_fix(B, A, tolerance=tolerances[k], canonical=canonical)
            fixed[k] = (U.to(dtype), Ahat.to(dtype))
    return [fixed[k] for k in range(len(pairs))]


def _gauge_fix_alike(
    pairs: Sequence[tuple[Tensor, Tensor]], tolerance: float, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor] | None]:
    """(U, Ahat) of pairs of one shape, None for those that are not ordinary."""
    B = torch.stack([B for B, _ in pairs]).double()
    A = torch.stack([A for _, A in pairs]).double()
    G = B.mT @ B
    scale = G.diagonal(dim1=1, dim2=2).clamp(min=1e-300).rsqrt()  # columns of B to norm 1
    eigenvalues, V = eigh(scale[:, :, None] * G * scale[:, None, :])
    s = eigenvalues.clamp(min=1e-30).sqrt()  # of a matrix of trace r: what is that small is not ordinary anyway
    X, T = scale[:, :, None] * V / s[:, None, :], s[:, :, None] * V.mT / scale[:, None, :]  # X T = I, (B X)^T B X = I
    U, Ahat = B @ X, T @ A
    energies = torch.linalg.eigvalsh(Ahat @ Ahat.mT)
    noise = torch.linalg.vector_norm(T.abs() @ torch.linalg.vector_norm(A, dim=2, keepdim=True), dim=(1, 2))
    made: list[tuple[Tensor, Tensor] | None] = []
    for i, (of_B, of_A, level) in enumerate(zip(s.tolist(), energies.tolist(), noise.tolist(), strict=True)):
        # Four digits above round-off in both Gram matrices, and twice the noise of the stored factors.
        sound = of_B[0] > max(1e-3 * of_B[-1], 2 * tolerance * math.hypot(*of_B))
        sound = sound and of_A[0] > max(1e-12 * of_A[-1], (2 * tolerance * level) ** 2)
        made.append((U[i].to(dtype, copy=True), Ahat[i].to(dtype, copy=True)) if sound else None)
    return made
