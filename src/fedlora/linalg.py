"""Numerical primitives on thin matrices: gauge fixing, the consensus subspace, the SVD of a sum of products.

No function here forms a d_out x d_in matrix (K, d_out x d_out, only where sum r_i exceeds d_out). Two rules, from
measurements (docs/decisions/0002-numerics.md):

* the small problems - a Gram matrix, its eigenvectors, every rank decision - are float64; the tall products keep the
  dtype of the data;
* a rank is decided relative to the unit roundoff u of the dtype in which the factors were *stored*, because that is
  the size of the noise that their rounding left in directions that are not there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from fedlora.errors import RankTie
from fedlora.shapes import Float, Tensor

Canonical = Literal["product", "B"]
Tie = Literal["energy", "paper", "error"]


def unit_roundoff(dtype: torch.dtype) -> float:
    """u, the largest relative error of rounding to `dtype`: 1.1e-16 (float64), 6e-8 (float32), 3.9e-3 (bfloat16)."""
    return torch.finfo(dtype).eps / 2


def rank_tolerance(dtype: torch.dtype) -> float:
    """The relative size under which a singular value of factors stored in `dtype` counts as rounding noise.

    u itself for the narrow types; 1e-11 for float64, whose factors often come through a gauge of condition up to 1e3
    that multiplied their noise. Calibrated by benchmarks/rank_tolerance.py; see docs/decisions/0003-rank-tolerance.md.
    """
    return max(unit_roundoff(dtype), 1e-11)


def tie_tolerance(dtype: torch.dtype) -> float:
    """The relative gap under which two consensus eigenvalues count as equal: sqrt(u).

    A cut inside a gap g moves by about u / g, so under sqrt(u) it would keep less than half of the digits.
    """
    return math.sqrt(unit_roundoff(dtype))


# ---------------------------------------------------------------------------------------------------- primitives


def gram(X: Float[Tensor, "*m d n"], dtype: torch.dtype = torch.float64) -> Float[Tensor, "*m n n"]:
    """X^T X in `dtype`. Above a size by panels of rows, which stay in cache, and by strips of the lower triangle.

    1.3 to 1.7x faster on a CPU than the whole product of the whole, which a cast of all of X would precede.
    """
    n, strip, panel = X.shape[-1], 48, 2048
    if n <= 2 * strip and X.shape[-2] <= panel:
        X = X.to(dtype)
        return X.mT @ X
    G = torch.zeros(*X.shape[:-2], n, n, dtype=dtype, device=X.device)
    for top in range(0, X.shape[-2], panel):
        P = X[..., top : top + panel, :].to(dtype)
        for at in range(0, n, strip):
            G[..., at:, at : at + strip] += P[..., at:].mT @ P[..., at : at + strip]
    for at in range(0, n, strip):  # mirrored in place: of this size a second matrix would cost more than the products
        block = G[..., at : at + strip, at : at + strip]
        block.copy_(block.tril() + block.tril(-1).mT)
        G[..., at : at + strip, at + strip :] = G[..., at + strip :, at : at + strip].mT
    return G


def eigh(G: Float[Tensor, "*m n n"]) -> tuple[Float[Tensor, "*m n"], Float[Tensor, "*m n n"]]:
    """Eigenvalues (ascending) and eigenvectors of a symmetric G, where G is. A small one on a GPU goes to the CPU and
    back, for its eigenproblem is a chain of tiny steps. How small was not measured; no GPU was at hand.
    """
    if G.device.type == "cpu" or G.shape[-1] > 512:
        values, vectors = torch.linalg.eigh(G)
        return values, vectors
    values, vectors = torch.linalg.eigh(G.cpu())
    return values.to(G.device), vectors.to(G.device)


def right_svd(X: Float[Tensor, "d n"]) -> tuple[Float[Tensor, " m"], Float[Tensor, "n m"]]:
    """Singular values (descending) and right singular vectors V of a tall X (d >= n, else of either shape), in float64.

    X = (X V s^-1) s V^T; the left factor is for the caller to form, of only those columns that it keeps.

    float32 data go through the Gram matrix X^T X in float64: its round-off, 1e-16 s_1^2, leaves singular values right
    down to 1e-8 s_1, which is below the float32 noise in X itself. float64 data go through QR and the SVD of R.
    """
    if X.dtype == torch.float64:
        _, s, Vh = torch.linalg.svd(torch.linalg.qr(X, mode="r").R, full_matrices=False)
        return s, Vh.mH
    eigenvalues, V = eigh(gram(X))
    return eigenvalues.flip(0).clamp(min=0).sqrt(), V.flip(1)


def _count_above(s: Tensor, floor: float) -> int:
    return int((s > floor).sum())


# -------------------------------------------------------------------------------------------------- gauge fixing


def gauge_fix(
    B: Float[Tensor, "d_out r"],
    A: Float[Tensor, "r d_in"],
    *,
    tolerance: float,
    canonical: Canonical = "product",
) -> tuple[Float[Tensor, "d_out k"], Float[Tensor, "k d_in"]]:
    """(U, Ahat) with U^T U = I and U @ Ahat = B @ A: what of (B, A) does not depend on the gauge.

    Args:
        B, A: one client's factors, any dtype.
        tolerance: relative size of rounding noise, see `rank_tolerance`.
        canonical: "product": U spans col(B A), a function of the update alone. "B": U spans col(B), as the paper
            writes; the same unless A is rank deficient.

    Returns:
        U (d_out, k) and Ahat (k, d_in) in float64, with k the numerical rank, 0 for a zero update.

    Source: paper section 4.1, Eq. (gauge fixing), with its footnote: a rank-deficient B gives rank(B) columns. A plain
    QR would complete them with arbitrary ones, which then enter the consensus with full weight.
    """
    B, A = B.double(), A.double()
    # Columns of B to a norm in [1, 2) by powers of two (exact), the inverse on the rows of A: a diagonal gauge is gone.
    norms = torch.linalg.vector_norm(B, dim=0)
    scale = torch.where(norms > 0, torch.exp2(-torch.floor(torch.log2(norms))), 1.0)
    B, A = B * scale, A / scale[:, None]

    s, V = right_svd(B)
    k = _count_above(s, tolerance * float(torch.linalg.vector_norm(s)))
    T = s[:k, None] * V[:, :k].mH
    U, Ahat = B @ (V[:, :k] / s[:k]), T @ A
    if canonical == "B" or k == 0:
        return U, Ahat

    # Directions of col(B) that A never uses. What rounding of B and A leaves there is bounded row by row.
    noise = tolerance * float(torch.linalg.vector_norm(T.abs() @ torch.linalg.vector_norm(A, dim=1)))
    s, O = right_svd(Ahat.mH)
    used = _count_above(s, noise)
    if used == k:  # none: the span of U is right as it is
        return U, Ahat
    return U @ O[:, :used], O[:, :used].mH @ Ahat


# ---------------------------------------------------------------------------------------------- consensus subspace


@dataclass(frozen=True, eq=False)
class CutAt:
    """Which eigenvectors of K stay: the first `keep`, after a rotation of those from `start` on where they tie."""

    keep: int
    gap: float
    tied: bool
    start: int = 0
    rotation: Tensor | None = None

    def turn(self, columns: Float[Tensor, "n m"]) -> Float[Tensor, "n k"]:
        """What stays of matrices that have one column for each eigenvector."""
        if self.rotation is not None:
            block = columns[:, self.start : self.start + len(self.rotation)] @ self.rotation
            columns = torch.cat([columns[:, : self.start], block], dim=1)
        return columns[:, : self.keep]


def cut_at(
    eigenvalues: Float[Tensor, " m"],
    right: Float[Tensor, "S n"],
    N: Float[Tensor, "S d_in"],
    R: int,
    *,
    tie_tolerance: float,
    tie: Tie,
) -> CutAt:
    """Where R cuts the eigenvalues (descending, above noise) of K; right^T N are the mean's coordinates, as `consensus`
    says. Source: docs/decisions/0004-ties.md.
    """
    union, keep = len(eigenvalues), min(R, len(eigenvalues))
    if keep == union:
        return CutAt(keep, math.inf, False)
    at_cut = float(eigenvalues[keep - 1])
    gap = (at_cut - float(eigenvalues[keep])) / at_cut
    tied = gap <= tie_tolerance
    if tied and tie == "error":
        raise RankTie(
            f"the rank budget R = {R} cuts a block of equal consensus eigenvalues ({at_cut:.6g}, relative gap "
            f"{gap:.1e}), so the top-{R} subspace is not unique. Raise R (the union of the client subspaces has "
            f"rank {union}), or use tie='energy'."
        )
    if not tied or tie == "paper":
        return CutAt(keep, gap, tied)
    inside = ((eigenvalues - at_cut).abs() <= tie_tolerance * at_cut).nonzero()
    first, last = int(inside[0]), int(inside[-1])
    _, O = right_svd((right[:, first : last + 1].mH.to(N) @ N).mH)
    return CutAt(keep, gap, tied, first, O)


@dataclass(frozen=True, eq=False)
class Consensus:
    """The server's low-rank state (U_ref, Z_g) and what is worth knowing about how it was cut.

    basis: U_ref (d_out, R'), orthonormal. coordinates: Z_g (R', d_in). R' = min(R, union rank).
    eigenvalues: of K, descending, those above noise, float64; union_rank: how many they are.
    gap: (lambda_R - lambda_R+1) / lambda_R at the cut; inf where nothing was cut.
    tied: the cut went through a block of eigenvalues equal within tolerance.
    captured: ||Delta W_g||^2 / ||M N||^2, the share of the mean update's energy that survives the projection.
    """

    basis: Tensor
    coordinates: Tensor
    eigenvalues: Tensor
    gap: float
    tied: bool
    captured: float

    @property
    def union_rank(self) -> int:
        return len(self.eigenvalues)


def consensus(
    M: Float[Tensor, "d_out S"],
    N: Float[Tensor, "S d_in"],
    R: int,
    *,
    tolerance: float,
    tie_tolerance: float,
    tie: Tie = "energy",
) -> Consensus:
    """The top-R eigenspace of K = M M^T and the projection of M @ N on it.

    With M = [sqrt(p_i) U_i] and N = [sqrt(p_i) Ahat_i], K = sum p_i U_i U_i^T and M N = sum p_i Delta W_i. From the
    thin SVD M = W s V^T: U_ref = M V_R s_R^-1 and Z_g = U_ref^T M N = s_R V_R^T N. No loop over clients is left.

    Args:
        M, N: in the compute dtype. R: the rank budget, >= 1.
        tolerance: relative noise of M's singular values. tie_tolerance: relative, on K's eigenvalues.
        tie: where R cuts a block of equal eigenvalues TopEig_R is not unique. "energy": keep those directions of the
            block that hold most of the mean update (unique again, and of least error). "paper": whatever the
            eigensolver returns. "error": raise `RankTie`.

    Source: paper Eqs. (subspace covariance), (consensus basis), (key identity); docs/decisions/0004-ties.md.
    """
    thin = M.shape[1] <= M.shape[0]
    # U_ref = M @ left (thin; else left itself) and Z_g = right^T @ N, column by column of the eigenvectors.
    if thin:
        s, V = right_svd(M)
        left, right = V / s, V * s
    else:  # K itself (d_out x d_out) is the smaller problem
        s, left = right_svd(M.mH)
        right = M.double().mH @ left
    union = _count_above(s, tolerance * float(s[0])) if len(s) else 0
    eigenvalues = s[:union].square()

    at = cut_at(eigenvalues, right, N, R, tie_tolerance=tie_tolerance, tie=tie)
    # ||M N||^2 without M N; only where something is cut
    energy = float(torch.sum((right.mH @ gram(N.mH)) * right.mH)) if at.keep < union else None
    left, right, keep = at.turn(left), at.turn(right), at.keep

    basis = M @ left.to(M) if thin else left.to(M)
    Z = right.mH.to(N) @ N
    if thin and keep and float(eigenvalues[keep - 1]) < 1e-4 * float(eigenvalues[0]):
        # M V s^-1 loses orthonormality as 1 / s: orthonormalise again, carrying Z along so that the product stays.
        basis, T = torch.linalg.qr(basis)
        Z = T @ Z
    captured = float(Z.double().square().sum()) / energy if energy and energy > 0 else 1.0
    return Consensus(basis, Z, eigenvalues, at.gap, at.tied, min(captured, 1.0))


# ------------------------------------------------------------------------------------------------- spectral form


@dataclass(frozen=True, eq=False)
class Spectrum:
    """An update in energy order: Delta W = U diag(s) Vh. U (d_out, l) and Vh (l, d_in) orthonormal, s (l,) > 0."""

    U: Tensor
    s: Tensor
    Vh: Tensor

    @property
    def rank(self) -> int:
        return len(self.s)

    def head(self, rank: int) -> Spectrum:
        """The `rank` strongest components: the best approximation of that rank (Eckart-Young)."""
        return Spectrum(self.U[:, :rank], self.s[:rank], self.Vh[:rank])


def with_canonical_signs(U: Tensor, s: Tensor, Vh: Tensor) -> Spectrum:
    """U diag(s) Vh with canonical signs: the entry of largest magnitude of each u_j positive, v_j flipped with it.

    Of one matrix, or of several of one shape.
    """
    if s.shape[-1] == 0:
        return Spectrum(U, s, Vh)
    sign = U.gather(-2, U.abs().argmax(dim=-2, keepdim=True)).sign()
    # Both were made by our callers, nobody else has them. Row after row in memory, for readouts and files.
    return Spectrum(U.mul_(sign).contiguous(), s, Vh.mul_(sign.mT).contiguous())


def spectral_form(basis: Float[Tensor, "d_out R"], Z: Float[Tensor, "R d_in"], *, noise: float) -> Spectrum:
    """The SVD of basis @ Z for an orthonormal basis, from the small side only.

    Components of singular value up to `noise` (absolute) are rounding, whose directions mean nothing: they are dropped.

    Source: paper Eq. (spectral readout), Z_g = O Sigma V^T and U_s = U_ref O.
    """
    s, O = right_svd(Z.mH)
    rank = _count_above(s, noise)
    s, O = s[:rank], O[:, :rank]
    Vh = (O / s).mH.to(Z) @ Z
    return with_canonical_signs(basis @ O.to(Z), s.to(Z), Vh)


def svd_of_product(B: Float[Tensor, "d_out S"], A: Float[Tensor, "S d_in"], *, tolerance: float) -> Spectrum:
    """The SVD of B @ A by QR of B, QR of A^T and the SVD of the S x S core. Exact: nothing above noise is dropped.

    Source: the thin exact SVD of docs/methods.md (FLoRIST's core). Householder QR is indifferent to column scales.
    """
    Q_B, R_B = torch.linalg.qr(B)
    Q_A, R_A = torch.linalg.qr(A.mH)
    O, s, Wh = torch.linalg.svd(R_B.double() @ R_A.double().mH, full_matrices=False)
    # Rounding of the terms B_j A_j and of two QRs: relative to the terms, since their sum may cancel.
    terms = torch.linalg.vector_norm(B.double(), dim=0) * torch.linalg.vector_norm(A.double(), dim=1)
    rank = _count_above(s, 4 * tolerance * float(torch.linalg.vector_norm(terms)))
    return with_canonical_signs(Q_B @ O[:, :rank].to(B), s[:rank].to(B), Wh[:rank].to(A) @ Q_A.mH)


# ------------------------------------------------------------------------------------------- the aggregate, whole


@dataclass(frozen=True, eq=False)
class ConsensusSpectrum:
    """The aggregate in energy order, and how it was cut: the other fields as in `Consensus`.

    union_rank: None where the budget reaches d_out: nothing can be cut then, and the fast path does not count.
    alignment: the squares of M^T U_s (S, l), float64, where they came with the rest at no cost; None elsewhere.
    """

    spectrum: Spectrum
    union_rank: int | None
    gap: float
    tied: bool
    captured: float
    alignment: Tensor | None = None


def consensus_spectrum(
    M: Float[Tensor, "d_out S"],
    N: Float[Tensor, "S d_in"],
    R: int,
    *,
    tolerance: float,
    tie_tolerance: float,
    tie: Tie = "energy",
) -> ConsensusSpectrum:
    """The SVD of the mean update M @ N, projected on the top-R eigenspace of K = M M^T. Arguments as for `consensus`.

    This is the reference, two steps as the paper has them; `fastpath.consensus_spectrum` is what runs.
    """
    c = consensus(M, N, R, tolerance=tolerance, tie_tolerance=tie_tolerance, tie=tie)
    noise = tolerance * float(torch.linalg.vector_norm(N, dtype=torch.float64))
    return ConsensusSpectrum(
        spectral_form(c.basis, c.coordinates, noise=noise), c.union_rank, c.gap, c.tied, c.captured
    )


def energy_spectrum(
    M: Float[Tensor, "d_out S"], N: Float[Tensor, "S d_in"], R: int, *, tolerance: float, tie_tolerance: float
) -> ConsensusSpectrum:
    """The same with the top-R left singular vectors of M @ N itself as the basis: least error, unbounded influence.

    gap: between squared singular values of M @ N. Source: named as future work in the paper's conclusion.
    """
    every = svd_of_product(M, N, tolerance=tolerance)
    energy = every.s.double().square()
    keep, gap = min(R, every.rank), math.inf
    if keep < every.rank:
        gap = float(1 - energy[keep] / energy[keep - 1])
    captured = float(energy[:keep].sum() / energy.sum()) if every.rank else 1.0
    return ConsensusSpectrum(every.head(keep), every.rank, gap, gap <= tie_tolerance, captured)
