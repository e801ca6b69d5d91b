"""A round's mean update within the consensus subspace of its clients, in energy order: the aggregation.

    mean = sum_i p_i B_i A_i = Q C P^T     from the factors as stored (`product`)
    K    = sum_i p_i U_i U_i^T             the clients' votes (`_cuts` weighs them, `consensus` takes the strongest)
    U_ref = TopEig_R(K)                    which directions R keeps
    U_ref U_ref^T C = O diag(s) W^T,       B = Q O sqrt(s),   A = sqrt(s) W^T P^T

If R cuts nothing, the result is the sum. What R or rounding took from it is measured, and no tolerance cuts it: only a
tail that the result's dtype could not hold is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlora.errors import LostUpdate
from fedlora.linalg.basics import U64, float64s, rank_tolerance, unit_roundoff
from fedlora.linalg.consensus import WHOLE, Reference, parts, strongest
from fedlora.linalg.product import Sums, Term, summed_in
from fedlora.linalg.spectrum import Part, Spectrum, canonical_signs, cut_by_rounding, store
from fedlora.linalg.stacks import CACHED, aligned, in_stacks

# The rounding of float64 arithmetic, relative to the summed terms: LAPACK's SVD of a graded matrix errs by some 50 u.
ARITHMETIC = 256 * U64


@dataclass(frozen=True, eq=False)
class ProjectedSum:
    """A sum of products, projected and in energy order, and how it was made.

    error: ||result - sum|| / ||sum||, from what was left out and from rounding together, as stored; never below the
    truth, and at most sqrt(2) above it plus the roundoff of float64. captured: the share of the sum's energy in the
    result. dropped: the share lost for another reason than R. size: ||sum||.
    union_rank, gap, tied: as in `consensus.Reference`. factored: how the columns of B and the rows of A were, as in
    "gram/qr".
    bases, alignments: for each term with a vote, U_i (d_out, k_i) and ||U_i^T u_j||^2 (l,) with each component.
    """

    spectrum: Spectrum
    error: float
    captured: float
    dropped: float
    size: float
    union_rank: int | None
    gap: float
    tied: bool
    factored: str
    bases: tuple[Tensor, ...] = ()
    alignments: tuple[Tensor, ...] = ()


def svd_of_product(B: Tensor, A: Tensor, roundoff: float | None = None) -> Spectrum:
    """B A in energy order, in its own dtype. roundoff: of B and A as they were stored; None: of B's dtype."""
    return projected_sum([Term(B, A, 1.0, unit_roundoff(B.dtype) if roundoff is None else roundoff)]).spectrum


def projected_sum(terms: Sequence[Term], rank: int | None = None, dtype: torch.dtype | None = None) -> ProjectedSum:
    """The sum of the terms within R = `rank` directions (None: whole), stored in `dtype` (None: float32, or float64 if
    a factor is).

    Raises:
        LostUpdate, OverflowError: that dtype cannot hold the sum.
    """
    return projected_sums([terms], [rank], dtype)[0]


def projected_sums(
    sums: Sequence[Sequence[Term]], ranks: Sequence[int | None], dtype: torch.dtype | None = None
) -> list[ProjectedSum]:
    """[projected_sum(terms, rank, dtype)], with the bits that each would have alone."""

    def kind(item: tuple[Sequence[Term], int | None]) -> tuple[Hashable, int]:
        terms, rank = item
        d_out, d_in, columns = len(terms[0].B), terms[0].A.shape[1], tuple((t.rank, t.votes) for t in terms)
        nbytes = 8 * sum(t.rank for t in terms) * max(d_out, d_in)
        alone = not aligned(d_out, d_in, *(t.rank for t in terms)) or (rank or 0) % 2
        return (d_out, d_in, columns, summed_in(terms), rank, terms[0].B.device), CACHED if alone else nbytes

    def work(stack: list[tuple[Sequence[Term], int | None]]) -> list[ProjectedSum] | None:
        every, rank = [terms for terms, _ in stack], stack[0][1]
        return _projections(every, rank, dtype or summed_in(every[0]))

    return in_stacks(work, [*zip(sums, ranks, strict=True)], kind)


def _projections(stack: Sequence[Sequence[Term]], rank: int | None, dtype: torch.dtype) -> list[ProjectedSum] | None:
    """None: the sums do not all go the same way."""
    sums = Sums.of(stack)
    if sums is None:
        return None
    cuts = [WHOLE] * len(stack) if rank is None or rank >= sums.C.shape[1] else _cuts(sums, rank)
    kept = [cut.basis for cut in cuts if cut.basis is not None]
    U_ref = torch.stack(kept) if kept else None
    O, s, Wh = torch.linalg.svd(sums.C if U_ref is None else U_ref.mT @ sums.C, full_matrices=False)
    values, sizes, floors = s.tolist(), sums.sizes.tolist(), sums.floor.tolist()
    counts = [cut_by_rounding(*x, dtype) for x in zip(values, sizes, floors, strict=True)]
    keep = counts[0].keep
    if len(counts) > 1 and (keep % 2 or any(count.keep != keep for count in counts)):
        return None
    directions, s, Wh = (O if U_ref is None else U_ref @ O)[:, :, :keep], s[:, :keep], Wh[:, :keep]
    sigma = s * sums.unit[:, None]
    _require_held(sigma, dtype)
    storing = parts([*sums.subspaces.values()], sums.left, dtype)
    B, A, off_B, off_A = _pairs(sums, directions, sigma, Wh.mT, dtype, storing)
    bases = [U for part in storing for U in part.out.unbind(1)]
    # ||dB A|| from the columns of dB, for the rows of A are orthogonal. Two roundings by the triangle inequality: at
    # most sqrt(2) above the truth, for they are independent.
    off_B, off_A = ((off * s / sums.unit[:, None]).sum(dim=1).sqrt() for off in (off_B, off_A))
    off = (off_B + off_A + ARITHMETIC * sums.sizes).tolist()
    energies, units = sums.C.square().sum(dim=(1, 2)).tolist(), sums.unit.tolist()
    along = [(own.coordinates.mT @ directions).square().sum(dim=1) for own in sums.subspaces.values()]
    stored = sigma.to(dtype)
    made = []
    for k, (count, cut) in enumerate(zip(counts, cuts, strict=True)):
        error, dropped, size = 0.0, 0.0, 0.0  # of a sum that cancels exactly, whose shares are undefined
        if keep:
            size = math.sqrt(energies[k])
            error = (math.sqrt(cut.left_out + count.trimmed) + off[k]) / size * (1 + 1e-12)
            dropped = min(((math.sqrt(cut.quiet + count.trimmed) + off[k]) / size) ** 2, 1.0)
        made.append(
            ProjectedSum(
                spectrum=Spectrum(B[k], stored[k], A[k], count.sound, count.rounding),
                error=error,
                captured=max(1 - error**2, 0.0),
                dropped=dropped,
                size=size * units[k],
                union_rank=cut.union_rank,
                gap=cut.gap,
                tied=cut.tied,
                factored=f"{sums.left.how}/{sums.right.how}",
                bases=tuple(
                    U[k, :, : own.ranks[k]].contiguous() for U, own in zip(bases, sums.subspaces.values(), strict=True)
                ),
                alignments=tuple(scores[k] for scores in along),
            )
        )
    return made


@dataclass(frozen=True, eq=False)
class Components:
    """A sum of products in energy order, of which `pair` makes as many components as are wanted.

    s (l,): all singular values, float64, descending. terms: the norm of the sizes of the summed terms, before any
    cancel: float64's rounding is some 1e-15 of it.
    """

    s: Tensor
    terms: float
    _sums: Sums
    _O: Tensor
    _W: Tensor

    @classmethod
    def of(cls, terms: Sequence[Term]) -> Components:
        """Raises `OverflowError` if float64 cannot hold the sum."""
        sums = Sums.of([terms])
        assert sums is not None, "one sum always goes one way"
        O, s, Wh = torch.linalg.svd(sums.C, full_matrices=False)
        return cls(s[0] * sums.unit, float(sums.sizes * sums.unit), sums, O, Wh.mT)

    def pair(self, count: int) -> tuple[Tensor, Tensor]:
        """(B (d_out, count), A (count, d_in)) of the strongest, float64, with sqrt(s) on both."""
        O, W = self._O[:, :, :count], self._W[:, :, :count]
        B, A, _, _ = _pairs(self._sums, O, self.s[None, :count], W, torch.float64)
        return B[0], A[0]


def _pairs(
    sums: Sums, O: Tensor, sigma: Tensor, W: Tensor, dtype: torch.dtype, parts: Sequence[Part] = ()
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """B = Q O sqrt(sigma) and A = sqrt(sigma) (P W)^T in `dtype`, and the squared rounding of each column and row.

    O (m, k, n), sigma (m, n), W (m, l, n). The entry of largest magnitude of each column of B is positive.
    """
    root = sigma.sqrt()
    B = O.new_empty(len(O), sums.left.tall.shape[1], O.shape[2], dtype=dtype)
    A = O.new_empty(len(O), O.shape[2], sums.right.tall.shape[1], dtype=dtype)
    off_B = store(sums.left, O * root[:, None], B, parts)
    sign = canonical_signs(B) if B.numel() else torch.ones_like(root)
    B.mul_(sign[:, None])  # A gets its sign before it is stored: one pass less
    return B, A, off_B, store(sums.right, W * (root * sign)[:, None], A.mT)


def _cuts(sums: Sums, rank: int) -> list[Reference]:
    """Where R cuts each matrix."""
    cuts = []
    for k, terms in enumerate(sums.terms):
        votes, noise, roundoffs = [sums.C[k, :, :0]], [], []
        for i, own in sums.subspaces.items():
            t, columns = terms[i], own.ranks[k]
            votes.append(math.sqrt(t.weight) * own.coordinates[k, :, :columns])
            noise += [t.weight * rank_tolerance(t.roundoff) ** 2] * columns
            roundoffs += [t.roundoff] * columns
        of = float64s(noise, sums.C), float64s(roundoffs, sums.C)
        cuts.append(strongest(torch.cat(votes, dim=1), *of, sums.C[k], rank, float(sums.floor[k])))
    return cuts


def _require_held(s: Tensor, dtype: torch.dtype) -> None:
    """Raises if `dtype` would store the largest of s (m, l) as zero or infinite."""
    for size in s[:, :1].flatten().tolist():
        if float(torch.tensor(size, dtype=torch.float64).to(dtype)) == 0:
            raise LostUpdate(
                f"the mean update has norm {size:.1e}, which {dtype} stores as zero. Updates that small usually come "
                f"from a wrong unit: check the scaling of the uploads, or send float64."
            )
        if size > torch.finfo(dtype).max:
            raise OverflowError(f"its norm is {size:.1e}, and {dtype} ends at {torch.finfo(dtype).max:.1e}")
