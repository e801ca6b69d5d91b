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
from fedlora.linalg.stacks import stacked


@dataclass(frozen=True, eq=False)
class Term:
    """weight B A, one term of a sum: B (d_out, r), A (r, d_in) as they were stored, with this unit roundoff.

    votes: whether its directions count in the consensus. weight: negative only for terms without a vote.
    """

    B: Tensor
    A: Tensor
    weight: float
    roundoff: float
    votes: bool = False

    @property
    def rank(self) -> int:
        return self.B.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """float64, or float32: it holds both factors as they are."""
        return torch.promote_types(torch.promote_types(self.B.dtype, self.A.dtype), torch.float32)


@dataclass(frozen=True, eq=False)
class Sums:
    """m sums of products whose terms have the same shapes: each is Q C P^T unit.

    C (m, k, l), float64, with entries below 2. unit (m,): powers of two, for squares of tiny numbers would be zero.
    sizes (m,): the norm of the sizes of all terms, before any cancel; floor (m,): the largest size that rounding of the
    stored factors can have in one direction, for roundings of different columns are independent; both in `unit`s.
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
        of_terms = weights.abs() * lengths / unit[:, None]
        sizes, floor = (torch.linalg.vector_norm(x, dim=1) for x in (of_terms, of_terms * tolerances))
        return cls(sums, left, right, C / unit[:, None, None], unit, sizes, floor)

    @cached_property
    def subspaces(self) -> dict[int, Subspace]:
        """For each term with a vote, by its place in the sums, in their order."""
        starts = [*accumulate((t.rank for t in self.terms[0]), initial=0)]
        voters = [i for i, t in enumerate(self.terms[0]) if t.votes]
        found: dict[int, Subspace] = {}
        for r in {self.terms[0][i].rank for i in voters}:
            some = [i for i in voters if self.terms[0][i].rank == r]
            at = torch.tensor([starts[i] for i in some]).to(self.C.device)[:, None] + torch.arange(r).to(self.C.device)
            tolerance = float64s([[rank_tolerance(terms[i].roundoff) for i in some] for terms in self.terms], self.C)
            found |= zip(some, subspaces(self.left, self.right, at, tolerance), strict=True)
        return {i: found[i] for i in voters}

    def bases(self, own: Subspace, dtype: torch.dtype) -> list[Tensor]:
        """U_i (d_out, k_i) in each matrix, in memory of its own: a history keeps it while the client is away."""
        if own.inner is None:
            U = self.left.tall @ own.coordinates
        else:
            U = self.left.tall[:, :, own.columns].double() @ own.inner
        return [u[:, :k].contiguous() for u, k in zip(U.to(dtype), own.ranks, strict=True)]


def summed_in(terms: Sequence[Term]) -> torch.dtype:
    """The dtype that holds every stored number as it is."""
    return torch.float64 if any(t.dtype == torch.float64 for t in terms) else torch.float32
