"""Which directions count: what each client's factors mean, and those of the mean that a budget R keeps.

    span(U_i) = col(B_i A_i)          the same for (B_i Q, Q^-1 A_i) with any invertible Q
    K = sum_i p_i U_i U_i^T           the clients' votes
    U_ref = TopEig_R(K)

All in coordinates of Q, where these are small matrices. A tolerance decides only which directions of a client have a
vote; it never removes part of the mean. If R cannot hold every direction, those with votes come first, by K's
eigenvalue; then the rest of the space, by the mean's energy there. What R took is measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedlora.linalg.factored import Factored
from fedlora.linalg.spectrum import Part

# A singular value of the votes below this share of the largest is float64's own rounding.
RESOLVED = 1e-13


class Subspace(NamedTuple):
    """An orthonormal basis of one client's col(B_i A_i) in each of m matrices. Of its r columns the first k count, the
    rank beyond rounding (0 for a zero update); the others are zero.

    coordinates (m, k, r): U_i = Q coordinates, with the Q of all clients' columns. inner (m, r, r): U_i = B_i inner,
    where that is sound, for it costs a product of r columns instead of k. columns: B_i's among all. ranks: k of each.
    """

    coordinates: Tensor
    inner: Tensor | None
    columns: slice
    ranks: list[int]

    def beside(self, last: Subspace) -> bool:
        """Whether both are made of B's own columns, as many each, and these follow the last one's."""
        if self.inner is None or last.inner is None:
            return False
        return self.inner.shape == last.inner.shape and self.columns.start == last.columns.stop


def parts(every: Sequence[Subspace], left: Factored, dtype: torch.dtype) -> list[Part]:
    """What stores the bases, in their order, with all columns of each."""
    groups: list[list[Subspace]] = []
    for own in every:
        if groups and own.beside(groups[-1][-1]):
            groups[-1].append(own)
        else:
            groups.append([own])
    made = []
    for group in groups:
        first, (m, d, _) = group[0], left.tall.shape
        inner = torch.stack([x.coordinates if x.inner is None else x.inner for x in group], dim=1)
        columns = slice(None) if first.inner is None else slice(first.columns.start, group[-1].columns.stop)
        made.append(Part(columns, inner, inner.new_empty(m, len(group), d, inner.shape[3], dtype=dtype)))
    return made


def subspaces(
    left: Factored, right: Factored, at: Tensor, full: Sequence[int], tolerance: Tensor
) -> list[Subspace] | None:
    """The clients' bases, from the Q R of all their columns, so that no tall matrix is read again.

    A direction counts if its singular value exceeds what rounding of the stored columns can make of it, tolerance
    ||(||b_j|| ||a_j||)_j||. So a direction of col(B) that A never uses is none, and a diagonal gauge changes nothing.
    Rounding reaches 0.4 of it, for deficient factors in gauges of condition 1e3.

    Args:
        left, right: of the columns of B and the rows of A. at: (c, r), each client's columns, which are neighbours, and
            then a zero column (`Factored.blocks`) as often as it takes. full: (c,), how many they are without those.
        tolerance: (m, c), see `rank_tolerance`.

    Returns None where ranks differ and a client may lack some of its own: each rank by itself is faster then. Raises
    `ArithmeticError` where that is so in some matrices of the stack alone, for then each of them must go alone.

    Source: paper section 4.1, Eq. (gauge fixing), with its footnote: a rank-deficient B gives rank(B) columns. A plain
    QR would add arbitrary columns, which would enter the consensus with full weight.
    """
    mixed = any(r < at.shape[1] for r in full)
    if mixed and (left.small is None or right.small is None):
        return None
    B, A = left.blocks(at), right.blocks(at)
    core = B.R @ A.R.mT
    sizes = torch.linalg.vector_norm(B.R, dim=2) * torch.linalg.vector_norm(A.R, dim=2)
    noise = tolerance * torch.linalg.vector_norm(sizes, dim=2)
    ranks, inner = [list(full)] * len(core), B.small
    sure = _surely_full(B, A, full, sizes, noise)
    if not bool(sure.all()):
        if mixed and bool(sure.any()):
            raise ArithmeticError("a stack of which only some can be padded: each matrix goes alone (`in_stacks`)")
        if mixed:
            return None
        found = (torch.linalg.svdvals(core) > noise[:, :, None]).sum(dim=2)
        ranks, size = found.tolist(), core.shape[2]  # of B's columns, or fewer: the matrix may have fewer rows
        turn = torch.eye(size, dtype=core.dtype, device=core.device)
        lacking = (found < size)[:, :, None, None]
        if bool(lacking.any()):  # of full rank any basis of col(B) will do, and the client's own costs nothing
            counts = torch.arange(size, device=core.device) < found[:, :, None, None]
            turn = torch.where(lacking, torch.linalg.svd(core)[0] * counts, turn)
        inner = B.inner(turn.expand(*core.shape[:2], size, size))
        if B.small is not None:  # in its order in memory, on which the bits of the next product depend
            inner = torch.empty_like(B.small).copy_(inner)
    coordinates = B.tall if inner is None else B.tall @ inner
    return [
        Subspace(
            coordinates[:, i, :, :r],
            None if B.small is None or inner is None else inner[:, i, :r, :r],
            slice(int(at[i, 0]), int(at[i, 0]) + r) if r else slice(0, 0),
            [of_each[i] for of_each in ranks],
        )
        for i, r in enumerate(full)
    ]


def _surely_full(B: Factored, A: Factored, full: Sequence[int], sizes: Tensor, noise: Tensor) -> Tensor:
    """(m,) whether no singular value of any client's core R_B R_A^T is noise: the least is at least 1 / ||R_A^-T
    R_B^-1||, which costs a tenth of the singular values."""
    if B.small is None or A.small is None:
        return torch.zeros(len(sizes), dtype=torch.bool, device=sizes.device)
    own = torch.arange(sizes.shape[2], device=sizes.device) < torch.tensor(full, device=sizes.device)[:, None]
    inverse = torch.linalg.matrix_norm(A.small.mT @ B.small * own[:, :, None])
    sure: Tensor = (inverse * noise < 1).all(dim=1) & (sizes > 0).logical_or_(~own).flatten(1).all(dim=1)
    return sure


class Reference(NamedTuple):
    """U_ref, and what it leaves out.

    basis (k, R): U_ref in coordinates; None if nothing is cut. union_rank: the directions beyond rounding that R
    chose among; None if nothing is cut. gap: (x_R - x_R+1) / x_R at the cut, of eigenvalues of K or of energies; inf if
    nothing was lost. tied: rounding cannot tell the two apart. left_out: the mean's energy outside of the basis. quiet:
    the part of that in directions which rounding could have made."""

    basis: Tensor | None
    union_rank: int | None
    gap: float
    tied: bool
    left_out: float
    quiet: float


WHOLE = Reference(None, None, math.inf, False, 0.0, 0.0)


def strongest(votes: Tensor, noise: Tensor, roundoffs: Tensor, C: Tensor, rank: int, floor: float) -> Reference:
    """U_ref in coordinates.

    Args:
        votes: (k, S_v), sqrt(p_i) U_i side by side. noise, roundoffs: (S_v,), for each column's client p_i times its
            squared tolerance, and the roundoff of its stored factors. C: (k, l), the mean.
        floor: the largest size that rounding of the stored factors can have in one direction of the mean.
    """
    # Not from K itself: a direction in which two float64 clients differ by 1e-9 has an eigenvalue of 1e-18.
    X, s, _ = torch.linalg.svd(votes, full_matrices=True)
    s = torch.cat([s, s.new_zeros(len(X) - len(s))])
    # Differences between clients that share a direction are made of rounding, so these clients' own noise counts there.
    shares = (votes.mT @ X).square() / s.square().clamp(min=1e-300)
    voted = (s.square() > noise @ shares) & (s > RESOLVED * s.amax())
    X, rest, shares, values = X[:, voted], by_energy(X[:, ~voted], C), shares[:, voted], s[voted].square()
    energy, of_rest = ((Y.mT @ C).square().sum(dim=1) for Y in (X, rest))
    loud = of_rest.sqrt() > floor
    first, union = len(values), len(values) + int(loud.sum())
    gap, tied = math.inf, False
    if rank < first:
        gap = float(1 - values[rank] / values[rank - 1])
        # An eigenvalue moves by the roundoff of its clients, each by its share, and a cut inside a gap g by u / g:
        # below sqrt(u) it would keep fewer than half of the digits.
        close = float((roundoffs @ shares[:, rank - 1 : rank + 1]).max().sqrt())
        if tied := gap <= close:  # TopEig_R is not unique: of equal votes, the directions that hold most of the mean
            block = (values / values[rank - 1] - 1).abs() <= close
            X[:, block] = by_energy(X[:, block], C)
            energy = (X.mT @ C).square().sum(dim=1)
    elif rank < union:  # between a direction with votes and one without, any gap is wide
        gap = 1.0 if rank == first else float(1 - of_rest[rank - first] / of_rest[rank - first - 1])
    every, sound = torch.cat([energy, of_rest]), torch.cat([torch.ones_like(voted[voted]), loud])
    return Reference(
        basis=torch.cat([X, rest], dim=1)[:, :rank],
        union_rank=union,
        gap=gap,
        tied=tied,
        left_out=float(every[rank:].sum()),
        quiet=float(every[rank:][~sound[rank:]].sum()),
    )


def by_energy(X: Tensor, C: Tensor) -> Tensor:
    """The span of X (k, n), turned so that the directions that hold most of C come first."""
    small = X.mT @ C
    turn: Tensor = torch.linalg.svd(small, full_matrices=small.shape[1] < small.shape[0])[0]
    return X @ turn
