"""Separates the part of one client's factors (B, A) that does not depend on the gauge from possible rounding.

    U, Ahat = gauge_fix(B, A, tolerance=u)           U^T U = I, U Ahat = B A up to rounding of B and A
    fixed   = gauge_splits(pairs, tolerances=us)     many pairs, those of one shape at once

Only here is the rank of a client decided: which of its directions have a vote in the consensus. This never decides
which directions belong to the clients' mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch

from fedlora.linalg.basics import count_above, eigh
from fedlora.linalg.batches import in_batches
from fedlora.linalg.shapes import Float, Tensor

Canonical = Literal["product", "B"]


def gauge_fix(
    B: Float[Tensor, "d_out r"],
    A: Float[Tensor, "r d_in"],
    *,
    tolerance: float,
    canonical: Canonical = "product",
) -> tuple[Float[Tensor, "d_out k"], Float[Tensor, "k d_in"]]:
    """(U, Ahat) with U^T U = I and U @ Ahat = B @ A up to rounding: the part of (B, A) that no gauge changes, without
    directions that rounding of the stored factors could have made. float64; k is the numerical rank, 0 for a zero
    update.

    Args:
        B, A: one client's factors, any dtype.
        tolerance: relative size of rounding noise, see `rank_tolerance`.
        canonical: "product": U spans col(B A), a function of the update alone. "B": U spans col(B), as the paper
            writes; the same unless A is rank deficient.

    Source: paper section 4.1, Eq. (gauge fixing), with its footnote: a rank-deficient B gives rank(B) columns. A plain
    QR would add arbitrary columns, which would enter the consensus with full weight.
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
            U, Ahat, k = U[:, :k] @ O, O.mH @ Ahat[:k], kept
    return U[:, :k], Ahat[:k]


def gauge_splits(
    pairs: Sequence[tuple[Tensor, Tensor]],
    *,
    tolerances: Sequence[float],
    canonical: Canonical = "product",
    dtype: torch.dtype = torch.float64,
) -> list[tuple[Tensor, Tensor]]:
    """[gauge_fix(B, A, ...) for each pair]; ordinary pairs of one shape go at once, from Gram matrices.

    Ordinary: float32, and after column scaling so well conditioned that a float64 Gram matrix gives the same span to
    1e-9. All others - deficient, badly conditioned, float64 - go through `gauge_fix` itself. dtype: of the results;
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
) -> list[tuple[Tensor, Tensor]]:
    """`gauge_splits` of the pairs at `members`, which have the same shapes, dtypes and tolerance."""
    B, A = pairs[members[0]]
    ordinary = torch.promote_types(B.dtype, A.dtype) != torch.float64 and 0 < B.shape[1] <= B.shape[0]
    some = [pairs[k] for k in members]
    made = _ordinary(some, tolerances[members[0]]) if ordinary else [None] * len(members)
    fixed = [
        found or gauge_fix(*pairs[k], tolerance=tolerances[k], canonical=canonical)
        for k, found in zip(members, made, strict=True)
    ]
    return [(U.to(dtype), Ahat.to(dtype)) for U, Ahat in fixed]


def _ordinary(pairs: Sequence[tuple[Tensor, Tensor]], tolerance: float) -> list[tuple[Tensor, Tensor] | None]:
    """(U, Ahat) of pairs of one shape, all of full rank; None for those that are not ordinary."""
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
    made: list[tuple[Tensor, Tensor] | None] = []
    for i, (of_B, of_A, level) in enumerate(zip(s.tolist(), energies.tolist(), noise.tolist(), strict=True)):
        # Four digits above roundoff in both Gram matrices, and twice the noise of the stored factors.
        sound = of_B[0] > max(1e-3 * of_B[-1], 2 * tolerance * math.hypot(*of_B))
        sound = sound and of_A[0] > max(1e-12 * of_A[-1], (2 * tolerance * level) ** 2)
        made.append((U[i].clone(), Ahat[i].clone()) if sound else None)
    return made
