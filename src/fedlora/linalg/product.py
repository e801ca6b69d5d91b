"""A sum of products in orthonormal coordinates, where it is a small matrix.

    sum_i w_i B_i A_i = [B_1 B_2 ..] diag(w) [A_1; A_2; ..] = Q C P^T,     C = R_B diag(w) R_A^T

The weights stand between the factors, so that these stay the numbers that were stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from fedlora.linalg.basics import float64s, rank_tolerance
from fedlora.linalg.consensus import Subspace, subspaces
from fedlora.linalg.factored import Factored, factored

# Clients of different ranks are padded to the largest and go together, if all are surely of full rank and that makes at
# most so many times the columns.
PADDED = 4


@dataclass(frozen=True, eq=False)
class Term:
    """weight B A, one term of a sum: B (d_out, r), A (r, d_in) as they were stored, with this unit roundoff.

    roundoff decides which directions may be noise: `Update.roundoff` of an upload, `unit_roundoff` of the dtype of a
    state's own pair, 0 for float64 numbers that were just computed. votes: whether its directions count in the
    consensus. weight: negative only for terms without a vote.
    """

    B: Tensor
    A: Tensor
    weight: float
    roundoff: float
    votes: bool = False

    @property
    def rank(self) -> int:
        return self.B.shape[1]


@dataclass(frozen=True, eq=False)
class Sums:
    """m sums of products whose terms have the same shapes: each is Q C P^T unit.

    C (m, k, l), float64, with entries below 2; k = min(d_out, S), l = min(d_in, S) for S columns of all terms. unit
    (m,): powers of two, for squares of tiny numbers would be zero. sizes (m,): the norm of the sizes of all terms,
    before any cancel; floor (m,): the largest size that rounding of the stored factors can have in one direction, for
    roundings of different columns are independent; both in `unit`s.
    """

    terms: Sequence[Sequence[Term]]
    left: Factored
    right: Factored
    C: Tensor
    unit: Tensor
    sizes: Tensor
    floor: Tensor

    @classmethod
    def of(cls, sums: Sequence[Sequence[Term]]) -> Sums | None:
        """None: the sums do not all go the same way."""
        dtype, first, S = summed_in(sums[0]), sums[0][0], sum(t.rank for t in sums[0])
        B = first.B.new_empty(len(sums), len(first.B), S, dtype=dtype)
        for k, terms in enumerate(sums):
            torch.cat([t.B.to(dtype) for t in terms], dim=1, out=B[k])
        A = torch.cat([t.A.to(dtype) for terms in sums for t in terms]).view(len(sums), S, first.A.shape[1])
        left, right = factored(B), factored(A.mT)
        if left is None or right is None:
            return None
        ranks = torch.tensor([t.rank for t in sums[0]], device=B.device)
        weights, tolerances = (
            float64s(each, B).repeat_interleave(ranks, dim=1)
            for each in (
                [[t.weight for t in terms] for terms in sums],
                [[rank_tolerance(t.roundoff) for t in terms] for terms in sums],
            )
        )
        C = (left.R * weights[:, None]) @ right.R.mT
        largest = C.flatten(1).abs().amax(dim=1) if C.numel() else C.new_zeros(len(C))
        if not bool(torch.isfinite(largest).all()):
            raise OverflowError("float64 holds up to 1.8e308")
        unit = torch.exp2(torch.frexp(largest).exponent.double() - 1)
        lengths = torch.linalg.vector_norm(left.R, dim=1) * torch.linalg.vector_norm(right.R, dim=1)
        of_terms = weights.abs() * lengths / unit[:, None]
        sizes, floor = (torch.linalg.vector_norm(x, dim=1) for x in (of_terms, of_terms * tolerances))
        return cls(sums, left, right, C / unit[:, None, None], unit, sizes, floor)

    @cached_property
    def subspaces(self) -> dict[int, Subspace]:
        """For each term with a vote, by its place in the sums, in their order."""
        ranks = [t.rank for t in self.terms[0]]
        starts = [*accumulate(ranks, initial=0)]
        voters = [i for i, t in enumerate(self.terms[0]) if t.votes]

        def among(some: Sequence[int]) -> list[Subspace] | None:
            """Of these voters, padded with a zero column to the largest of their ranks."""
            r = max(ranks[i] for i in some)
            at = [[starts[i] + j if j < ranks[i] else starts[-1] for j in range(r)] for i in some]
            tolerance = float64s([[rank_tolerance(terms[i].roundoff) for i in some] for terms in self.terms], self.C)
            columns = torch.tensor(at, dtype=torch.long, device=self.C.device)
            return subspaces(self.left, self.right, columns, [ranks[i] for i in some], tolerance)

        if voters and len(voters) * max(ranks[i] for i in voters) <= PADDED * sum(ranks) and (made := among(voters)):
            return dict(zip(voters, made, strict=True))
        found: dict[int, Subspace] = {}
        for r in {ranks[i] for i in voters}:
            some = [i for i in voters if ranks[i] == r]
            found |= zip(some, among(some) or (), strict=True)
        return {i: found[i] for i in voters}


def summed_in(terms: Sequence[Term]) -> torch.dtype:
    """The dtype that holds every stored number as it is."""
    return torch.float64 if any(torch.float64 in (t.B.dtype, t.A.dtype) for t in terms) else torch.float32
