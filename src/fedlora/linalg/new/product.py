"""A sum of products in energy order, whole or projected on the clients' consensus; no (d_out, d_in) matrix is formed.

    sum_i w_i B_i A_i = [B_1 B_2 ..] diag(w) [A_1; A_2; ..] = Q C P^T,     C = R_B diag(w) R_A^T
    U_ref U_ref^T C = O diag(s) W^T,     B = Q O sqrt(s),   A = sqrt(s) W^T P^T

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

from .basics import U64, float64s, rank_tolerance
from .consensus import NO_CUT, Cut, Vote, strongest
from .factored import Factored, factored
from .spectrum import Spectrum, cut_by_rounding, store
from .stacks import in_stacks, stacked

# The rounding of float64 arithmetic, relative to the summed terms: LAPACK's SVD of a graded matrix errs by some 50 u.
ARITHMETIC = 256 * U64


@dataclass(frozen=True, eq=False)
class Term:
    """weight B A, one term of a sum: B (d_out, r), A (r, d_in) as they were stored, with this unit roundoff.

    weight: negative only for what a server adds itself. U: (d_out, k), the subspace that this term votes for (`gauge`);
    None: it has no vote.
    """

    B: Tensor
    A: Tensor
    weight: float
    roundoff: float
    U: Tensor | None = None

    @property
    def rank(self) -> int:
        return self.B.shape[1]


@dataclass(frozen=True, eq=False)
class Projection:
    """A sum of products, projected and in energy order, and how it was made.

    error: ||result - sum|| / ||sum||, from what was left out and from rounding together, as stored; never below the
    truth, and at most sqrt(2) above it plus the roundoff of float64. captured: the share of the sum's energy in the
    result. dropped: the share lost for another reason than R. size: ||sum||. cut: where R cut.
    how: "gram" or "qr", for the columns of B and the rows of A.
    """

    spectrum: Spectrum
    error: float
    captured: float
    dropped: float
    size: float
    cut: Cut
    how: tuple[str, str]


def projected(terms: Sequence[Term], rank: int | None = None, dtype: torch.dtype | None = None) -> Projection:
    """The sum of the terms within R = `rank` directions (None: whole), stored in `dtype` (None: float32, or float64 if
    a factor is).

    Raises:
        LostUpdate, OverflowError: that dtype cannot hold the sum.
    """
    return all_projected([terms], [rank], dtype)[0]


def all_projected(
    sums: Sequence[Sequence[Term]], ranks: Sequence[int | None], dtype: torch.dtype | None = None
) -> list[Projection]:
    """[projected(terms, rank, dtype)], with the bits that each would have alone."""

    def kind(item: tuple[Sequence[Term], int | None]) -> tuple[Hashable, int]:
        terms, rank = item
        d_out, d_in, columns = len(terms[0].B), terms[0].A.shape[1], tuple(t.rank for t in terms)
        return (d_out, d_in, columns, summed_in(terms), rank, terms[0].B.device), 8 * sum(columns) * max(d_out, d_in)

    def work(stack: list[tuple[Sequence[Term], int | None]]) -> list[Projection] | None:
        every = [terms for terms, _ in stack]
        return _projections(every, stack[0][1], dtype or summed_in(every[0]))

    return in_stacks(work, [*zip(sums, ranks, strict=True)], kind)


def summed_in(terms: Sequence[Term]) -> torch.dtype:
    """The dtype that holds every stored number as it is."""
    exact = any(t.dtype == torch.float64 for term in terms for t in (term.B, term.A))
    return torch.float64 if exact else torch.float32


@dataclass(frozen=True, eq=False)
class Sums:
    """m sums of products with terms of the same shapes: each is Q C P^T unit.

    C (m, k, l), float64, with entries below 2. unit (m,): powers of two, for squares of tiny numbers would be zero.
    terms (m,): the norm of the sizes of all summed terms, before any cancel; floor (m,): the largest size that rounding
    of the stored factors can have in one direction, for roundings of different columns are independent; in `unit`s.
    """

    left: Factored
    right: Factored
    C: Tensor
    unit: Tensor
    terms: Tensor
    floor: Tensor

    @classmethod
    def of(cls, sums: Sequence[Sequence[Term]]) -> Sums | None:
        """None: the sums do not all go the same way."""
        dtype, places = summed_in(sums[0]), range(len(sums[0]))
        B = torch.cat([stacked([terms[k].B.to(dtype) for terms in sums]) for k in places], dim=2)
        A = torch.cat([stacked([terms[k].A.to(dtype) for terms in sums]) for k in places], dim=1)
        left, right = factored(B), factored(A.mT)
        if left is None or right is None:
            return None
        weights = float64s([[t.weight for t in terms for _ in range(t.rank)] for terms in sums], B)
        tolerances = float64s([[rank_tolerance(t.roundoff) for t in terms for _ in range(t.rank)] for terms in sums], B)
        C = (left.R * weights[:, None]) @ right.R.mT
        largest = C.flatten(1).abs().amax(dim=1) if C.numel() else C.new_zeros(len(C))
        if not bool(torch.isfinite(largest).all()):
            raise OverflowError("float64 holds up to 1.8e308")
        unit = torch.exp2(torch.frexp(largest).exponent.double() - 1)
        lengths = torch.linalg.vector_norm(left.R, dim=1) * torch.linalg.vector_norm(right.R, dim=1)
        sizes = weights.abs() * lengths / unit[:, None]
        terms, floor = (torch.linalg.vector_norm(x, dim=1) for x in (sizes, sizes * tolerances))
        return cls(left, right, C / unit[:, None, None], unit, terms, floor)

    def cut(self, k: int, terms: Sequence[Term], rank: int | None) -> Cut:
        """Where R cuts sum k."""
        if rank is None or rank >= self.C.shape[1]:
            return NO_CUT
        voters = [t for t in terms if t.U is not None]
        columns = [math.sqrt(t.weight) * t.U.double() for t in voters if t.U is not None]
        every = torch.cat([self.left.tall[k, :, :0].double(), *columns], dim=1)
        votes = [Vote(U.shape[1], t.weight, t.roundoff) for t, U in zip(voters, columns, strict=True)]
        return strongest(self.left.one(k).coordinates(every[None])[0], votes, self.C[k], rank, float(self.floor[k]))


def _projections(sums: Sequence[Sequence[Term]], rank: int | None, dtype: torch.dtype) -> list[Projection] | None:
    """None: the sums do not all go the same way."""
    made = Sums.of(sums)
    if made is None:
        return None
    cuts = [made.cut(k, terms, rank) for k, terms in enumerate(sums)]
    bases = [cut.basis for cut in cuts if cut.basis is not None]
    basis = torch.stack(bases) if bases else None
    O, s, Wh = torch.linalg.svd(made.C if basis is None else basis.mT @ made.C, full_matrices=False)
    sizes = zip(s.tolist(), made.terms.tolist(), made.floor.tolist(), strict=True)
    counts = [cut_by_rounding(x, terms=terms, floor=floor, dtype=dtype) for x, terms, floor in sizes]
    keep = counts[0].keep
    if any(count.keep != keep for count in counts):
        return None
    O, s, Wh = O[:, :, :keep], s[:, :keep], Wh[:, :keep]
    true = s * made.unit[:, None]
    _require_held(true, dtype)
    root = true.sqrt()
    B = O.new_empty(len(O), made.left.tall.shape[1], keep, dtype=dtype)
    A = O.new_empty(len(O), keep, made.right.tall.shape[1], dtype=dtype)
    off_B = store(made.left, (O if basis is None else basis @ O) * root[:, None], B)
    # The entry of largest magnitude of each u_j is positive. A gets its sign before it is stored: one pass less.
    sign = torch.where(B.amax(dim=1) >= -B.amin(dim=1), 1.0, -1.0) if B.numel() else torch.ones_like(s)
    B.mul_(sign[:, None])
    off_A = store(made.right, Wh.mT * (root * sign)[:, None], A.mT)
    # ||dB A|| from the columns of dB, for the rows of A are orthogonal. Two roundings by the triangle inequality: at
    # most sqrt(2) above the truth, for they are independent.
    off_B, off_A = ((off * s / made.unit[:, None]).sum(dim=1).sqrt() for off in (off_B, off_A))
    off = (off_B + off_A + ARITHMETIC * made.terms).tolist()
    energies, units = made.C.square().sum(dim=(1, 2)).tolist(), made.unit.tolist()
    values = true.to(dtype)
    how = (made.left.how, made.right.how)
    results = []
    for k, (count, cut) in enumerate(zip(counts, cuts, strict=True)):
        spectrum = Spectrum(B[k], values[k], A[k], count.sound, count.rounding)
        if keep == 0:  # exact cancellation, or nothing was sent: shares of the sum are undefined
            results.append(Projection(spectrum, 0.0, 1.0, 0.0, 0.0, cut, how))
            continue
        error = (math.sqrt(cut.left_out + count.trimmed) + off[k]) / math.sqrt(energies[k]) * (1 + 1e-12)
        dropped = min((math.sqrt(cut.quiet + count.trimmed) + off[k]) ** 2 / energies[k], 1.0)
        size = math.sqrt(energies[k]) * units[k]
        results.append(Projection(spectrum, error, max(1 - error**2, 0.0), dropped, size, cut, how))
    return results


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
