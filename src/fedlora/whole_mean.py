"""Where no budget cuts the mean update (R >= sum r_i): its spectrum straight from the factors as they came.

The third row of the table in `fastpath`. No client's gauge has to be fixed before the sum, and matrices of one shape go
together. It answers only where every rank is beyond doubt; elsewhere gauge fixing and the consensus do the work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from fedlora.fastpath import CACHED, LEAST_IN_FLOAT32
from fedlora.linalg import Spectrum, eigh, gram, with_canonical_signs
from fedlora.parallel import Each, one_by_one

# Columns, relative to the smaller side of the matrix, up to which `whole_means` pays: its S^3 terms are float64.
_WHOLE_UPTO = 0.3
# How much larger than a sum of unit vectors its terms may be, so that float32 keeps 1e-6 of it.
_MOST_IN_FLOAT32 = 8.0


@dataclass(frozen=True, eq=False)
class WholeMean:
    """The mean update of clients whose factors all have full rank, and of each client, in their order, its basis
    U_i (d_out, r_i) and alignment ||U_i^T u_j||^2 (l,) with each component.
    """

    spectrum: Spectrum
    bases: tuple[Tensor, ...]
    alignments: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Uncut:
    """One matrix's clients, whose mean no budget cuts: their factor pairs, weights p_i and relative rounding noise."""

    pairs: Sequence[tuple[Tensor, Tensor]]
    weights: Sequence[float]
    tolerance: float


def whole_means(problems: Sequence[Uncut], each: Each = one_by_one) -> list[WholeMean | None]:
    """Of each: sum_i p_i B_i A_i in energy order, straight from the factors as they came; matrices of a shape at once.

    None where this is not sound: float64, or a rank that could be mistaken; and where the clients have so many columns
    that it does not pay. each: how to go through the batches, which are the same however that is.
    """
    alike: dict[tuple[torch.device, int, int, tuple[int, ...]], list[int]] = {}
    for k, problem in enumerate(problems):
        dtypes = {t.dtype for pair in problem.pairs for t in pair}
        ranks = tuple(B.shape[1] for B, _ in problem.pairs)
        B, A = problem.pairs[0]
        fits = min(ranks) > 0 and sum(ranks) <= _WHOLE_UPTO * min(len(B), A.shape[1])
        if dtypes == {torch.float32} and fits and min(problem.weights) > 0:
            alike.setdefault((B.device, len(B), A.shape[1], ranks), []).append(k)
    batches = []
    for (_, d_out, _, ranks), members in alike.items():
        at_once = max(1, CACHED // (8 * d_out * sum(ranks)))
        batches += [(members[first : first + at_once], ranks) for first in range(0, len(members), at_once)]
    found = each(lambda batch: _whole_means([problems[k] for k in batch[0]], batch[1]), batches)
    made: list[WholeMean | None] = [None] * len(problems)
    for (members, _), means in zip(batches, found, strict=True):
        for k, mean in zip(members, means, strict=True):
            made[k] = mean
    return made


def _whole_means(problems: Sequence[Uncut], ranks: Sequence[int]) -> list[WholeMean | None]:
    """Of matrices of one shape, m of them; all arrays have m in front.

    With the columns of B = [B_1 B_2 ...] scaled to norm 1 by D, and L L^T their Gram matrix, the mean is
    (B D L^-T) (L^T D^-1 P A): the first orthonormal, and the Gram matrix of the second's rows known from that of A.
    """
    B = _stacked([torch.cat([B for B, _ in problem.pairs], dim=1) for problem in problems])
    A = _stacked([torch.cat([A for _, A in problem.pairs], dim=0) for problem in problems])
    G_B, G_A = gram(B), gram(A.mT)
    sizes_A = G_A.diagonal(dim1=1, dim2=2)
    scale = G_B.diagonal(dim1=1, dim2=2).clamp(min=1e-300).rsqrt()
    G = scale[:, :, None] * G_B * scale[:, None, :]
    L, failed = torch.linalg.cholesky_ex(G)
    L = torch.where(failed[:, None, None] > 0, torch.eye(L.shape[1]).to(L), L)  # not to be used, only to be finite
    per_slot = [float(r) for r in ranks for _ in range(r)]
    per_row = [[p for p, r in zip(problem.weights, ranks, strict=True) for _ in range(r)] for problem in problems]
    weight = torch.tensor(per_row, dtype=torch.float64).to(scale)
    Y = L * (weight / scale)[:, :, None]  # Z = Y^T A
    eigenvalues, O = eigh(Y.mT @ G_A @ Y)
    s, O = eigenvalues.flip(1).clamp(min=1e-300).sqrt(), O.flip(2)

    # Full rank beyond doubt, of B D and of Z: so of each client's factors, and far above what rounding can do.
    blocks = [slice(end - r, end) for r, end in zip(ranks, accumulate(ranks), strict=True)]
    # What rounding of the stored factors can be, before the tolerance: of sqrt(p_i) U_i^T B_i A_i, row by row at most.
    noise = (weight * sizes_A / scale.square() * torch.tensor(per_slot, device=scale.device)).sum(dim=1)
    terms = (Y.square().sum(dim=2) * sizes_A).sum(dim=1)  # the round-off of Z Z^T is 1e-16 of it
    pivot = L.diagonal(dim1=1, dim2=2).amin(dim=1)
    rows = zip(failed.tolist(), pivot.tolist(), s.tolist(), noise.tolist(), terms.tolist(), strict=True)
    sound = []
    for problem, (fails, least, values, amplified, total) in zip(problems, rows, strict=True):
        in_B = max(LEAST_IN_FLOAT32**0.5, 4 * problem.tolerance * max(ranks) ** 0.5)
        in_Z = max(1e-5 * values[0], 3e-6 * math.sqrt(total), 4 * problem.tolerance * math.sqrt(amplified))
        sound.append(not fails and least > in_B and values[-1] > in_Z)
    if not any(sound):
        return [None] * len(problems)

    to_U, to_V = torch.linalg.solve_triangular(L.mT, O, upper=True), (O / s[:, None, :]).mT @ Y.mT
    U = _times(B, scale[:, :, None] * to_U, _cancels(to_U))
    Vh = _times(A.mT, to_V.mT, _cancels(to_V.mT * sizes_A.sqrt()[:, :, None])).mT
    every = with_canonical_signs(U, s.to(U), Vh)
    bases, alignments = _of_clients(problems, G, scale, L @ O, blocks)
    return [
        WholeMean(Spectrum(every.U[k], every.s[k], every.Vh[k]), bases[k], alignments[k]) if sound[k] else None
        for k in range(len(problems))
    ]


def _stacked(matrices: list[Tensor]) -> Tensor:
    return torch.stack(matrices) if len(matrices) > 1 else matrices[0][None]


def _cancels(small: Tensor) -> bool:
    """Whether sums of columns of norm 1 with the coefficients in `small` (.., S, l) cancel more than float32 bears."""
    return float(torch.linalg.vector_norm(small, dim=-2).max()) > _MOST_IN_FLOAT32


def _times(X: Tensor, small: Tensor, in_float64: bool) -> Tensor:
    """X @ small in X's dtype and memory layout."""
    wide = X.double() if in_float64 else X
    small = small.to(wide)
    return (wide @ small if X.is_contiguous() else (small.mT @ wide.mT).mT).to(X)


def _of_clients(
    problems: Sequence[Uncut], G: Tensor, scale: Tensor, along: Tensor, blocks: Sequence[slice]
) -> tuple[list[tuple[Tensor, ...]], list[tuple[Tensor, ...]]]:
    """Each client's basis and alignment, matrix by matrix. along: D B^T U."""
    bases = [[torch.empty(0)] * len(blocks) for _ in problems]
    alignments = [[torch.empty(0)] * len(blocks) for _ in problems]
    ranks = [k.stop - k.start for k in blocks]
    for r in sorted(set(ranks)):
        alike = [i for i, rank in enumerate(ranks) if rank == r]
        at = torch.stack([torch.arange(blocks[i].start, blocks[i].stop, device=G.device) for i in alike])
        own, _ = torch.linalg.cholesky_ex(G[:, at[:, :, None], at[:, None, :]])  # B_i D_i = U_i own^T
        score = torch.linalg.solve_triangular(own, along[:, at], upper=False).square().sum(dim=2)
        to_basis = torch.linalg.solve_triangular(own, torch.diag_embed(scale[:, at]), upper=False).mT
        careful = _cancels(to_basis / scale[:, at][..., None])
        to_basis = to_basis if careful else to_basis.to(problems[0].pairs[0][0])
        for k, problem in enumerate(problems):
            for j, i in enumerate(alike):
                B_i = problem.pairs[i][0]
                bases[k][i], alignments[k][i] = _times(B_i, to_basis[k, j], careful), score[k, j]
    return [tuple(b) for b in bases], [tuple(a) for a in alignments]
