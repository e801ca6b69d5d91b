"""Separates the part of one client's factors (B, A) that does not depend on the gauge from possible rounding.

    U, Ahat = gauge_fix(B, A, tolerance=u)           U^T U = I, U Ahat = B A up to rounding of B and A
    split   = gauge_split(B, A, tolerance=u)         the same, and the rest: no part of B A is lost
    splits  = gauge_splits(pairs, tolerances=us)     many pairs, those of one shape at once

Only here is the rank of a client decided: which of its directions have a vote in the consensus. This never decides
which directions belong to the clients' mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from fedlora.linalg.basics import count_above, eigh, unit_roundoff
from fedlora.linalg.batches import in_batches
from fedlora.linalg.shapes import Float, Tensor

Canonical = Literal["product", "B"]


@dataclass(frozen=True, eq=False)
class Split:
    """B A = U Ahat + U_rest A_rest, with [U U_rest] orthonormal.

    U (d_out, k) and Ahat (k, d_in): the directions beyond rounding. U_rest (d_out, q) and A_rest (q, d_in): the
    directions that rounding of the stored factors could have made; q = 0 if they hold nothing.
    """

    U: Tensor
    Ahat: Tensor
    U_rest: Tensor
    A_rest: Tensor

    def to(self, dtype: torch.dtype) -> Split:
        """The same in another dtype."""
        return Split(self.U.to(dtype), self.Ahat.to(dtype), self.U_rest.to(dtype), self.A_rest.to(dtype))


def gauge_fix(
    B: Float[Tensor, "d_out r"],
    A: Float[Tensor, "r d_in"],
    *,
    tolerance: float,
    canonical: Canonical = "product",
) -> tuple[Float[Tensor, "d_out k"], Float[Tensor, "k d_in"]]:
    """(U, Ahat) with U^T U = I and U @ Ahat = B @ A up to rounding: the part of (B, A) that no gauge changes.

    Arguments as for `gauge_split`, float64 results. k is the numerical rank, 0 for a zero update.

    Source: paper section 4.1, Eq. (gauge fixing), with its footnote: a rank-deficient B gives rank(B) columns. A plain
    QR would add arbitrary columns, which would enter the consensus with full weight.
    """
    split = gauge_split(B, A, tolerance=tolerance, canonical=canonical)
    return split.U, split.Ahat


def gauge_split(
    B: Float[Tensor, "d_out r"],
    A: Float[Tensor, "r d_in"],
    *,
    tolerance: float,
    canonical: Canonical = "product",
) -> Split:
    """Splits one client's update into directions beyond rounding and directions that rounding could have made.

    Args:
        B, A: one client's factors, any dtype.
        tolerance: relative size of rounding noise, see `rank_tolerance`.
        canonical: "product": U spans col(B A), a function of the update alone. "B": U spans col(B), as the paper
            writes; the same unless A is rank deficient.

    Returns:
        a `Split` in float64.
    """
    B, A = B.double(), A.double()
    # Powers of two (exact) scale B's columns to a norm in [1, 2), A's rows by the inverse. Removes a diagonal gauge.
    norms = torch.linalg.vector_norm(B, dim=0)
    scale = torch.where(norms > 0, torch.exp2(-torch.floor(torch.log2(norms))), 1.0)
    B, A = B * scale, A / scale[:, None]

    Q, R = torch.linalg.qr(B)
    W, s, Vh = torch.linalg.svd(R, full_matrices=False)
    T = s[:, None] * Vh  # B = (Q W) T
    U, Ahat = Q @ W, T @ A
    k = count_above(s, tolerance * float(torch.linalg.vector_norm(s)))
    if canonical == "product" and k:
        # A never uses these directions of col(B). Each row bounds the rounding of B and A there.
        noise = tolerance * float(torch.linalg.vector_norm(T[:k].abs() @ torch.linalg.vector_norm(A, dim=1)))
        O, used, _ = torch.linalg.svd(Ahat[:k], full_matrices=A.shape[1] < k)
        kept = count_above(used, noise)
        if kept < k:  # otherwise the span of U is right already
            U = torch.cat([U[:, :k] @ O, U[:, k:]], dim=1)
            Ahat = torch.cat([O.mH @ Ahat[:k], Ahat[k:]])
            k = kept
    terms = float(torch.linalg.vector_norm(torch.linalg.vector_norm(A, dim=1)))  # columns of B have norms near 1
    rest = float(torch.linalg.vector_norm(Ahat[k:]))
    end = len(Ahat) if rest > 8 * unit_roundoff(torch.float64) * terms else k  # float64 cannot resolve less
    return Split(U[:, :k], Ahat[:k], U[:, k:end], Ahat[k:end])


def gauge_splits(
    pairs: Sequence[tuple[Tensor, Tensor]],
    *,
    tolerances: Sequence[float],
    canonical: Canonical = "product",
    dtype: torch.dtype = torch.float64,
) -> list[Split]:
    """[gauge_split(B, A, ...) for each pair]; ordinary pairs of one shape go at once, from Gram matrices.

    Ordinary: float32, and after column scaling so well conditioned that a float64 Gram matrix gives the same span to
    1e-9. All others - deficient, badly conditioned, float64 - go through `gauge_split` itself. dtype: of the results;
    the computation is float64.
    """
    kinds = [(B.shape, A.shape, B.dtype, A.dtype, t) for (B, A), t in zip(pairs, tolerances, strict=True)]
    work = partial(_split, pairs, tolerances, canonical, dtype)
    return in_batches(work, kinds, [8 * B.numel() for B, _ in pairs])


def _split(
    pairs: Sequence[tuple[Tensor, Tensor]],
    tolerances: Sequence[float],
    canonical: Canonical,
    dtype: torch.dtype,
    members: list[int],
) -> list[Split]:
    """`gauge_splits` of the pairs at `members`, which have the same shapes, dtypes and tolerance."""
    B, A = pairs[members[0]]
    ordinary = torch.promote_types(B.dtype, A.dtype) != torch.float64 and 0 < B.shape[1] <= B.shape[0]
    some = [pairs[k] for k in members]
    made = _ordinary(some, tolerances[members[0]]) if ordinary else [None] * len(members)
    return [
        (found or gauge_split(*pairs[k], tolerance=tolerances[k], canonical=canonical)).to(dtype)
        for k, found in zip(members, made, strict=True)
    ]


def _ordinary(pairs: Sequence[tuple[Tensor, Tensor]], tolerance: float) -> list[Split | None]:
    """The splits of pairs of one shape, all of full rank; None for those that are not ordinary."""
    B = torch.stack([B for B, _ in pairs]).double()
    A = torch.stack([A for _, A in pairs]).double()
    G = B.mT @ B
    scale = G.diagonal(dim1=1, dim2=2).clamp(min=1e-300).rsqrt()  # columns of B to norm 1
    eigenvalues, V = eigh(scale[:, :, None] * G * scale[:, None, :])
    s = eigenvalues.clamp(min=1e-30).sqrt()  # the trace is r, so a pair with such small eigenvalues is not ordinary
    X, T = scale[:, :, None] * V / s[:, None, :], s[:, :, None] * V.mT / scale[:, None, :]  # X T = I, (B X)^T B X = I
    U, Ahat = B @ X, T @ A
    energies = torch.linalg.eigvalsh(Ahat @ Ahat.mT)
    noise = torch.linalg.vector_norm(T.abs() @ torch.linalg.vector_norm(A, dim=2, keepdim=True), dim=(1, 2))
    made: list[Split | None] = []
    for i, (of_B, of_A, level) in enumerate(zip(s.tolist(), energies.tolist(), noise.tolist(), strict=True)):
        # Four digits above roundoff in both Gram matrices, and twice the noise of the stored factors.
        sound = of_B[0] > max(1e-3 * of_B[-1], 2 * tolerance * math.hypot(*of_B))
        sound = sound and of_A[0] > max(1e-12 * of_A[-1], (2 * tolerance * level) ** 2)
        none = (U.new_empty(U.shape[1], 0), A.new_empty(0, A.shape[2]))
        made.append(Split(U[i].clone(), Ahat[i].clone(), *none) if sound else None)
    return made
