"""The mean update of a round, projected on the consensus subspace of its clients: the paper's aggregation, in float64.

    mean = sum_i p_i B_i A_i            from the factors as stored; no tolerance ever removes part of it
    K    = sum_i p_i U_i U_i^T          the clients' votes, U_i from `gauge_fix`
    U_ref = TopEig_R(K),  result = U_ref U_ref^T mean, as its SVD

The work is done in coordinates of the columns that the clients sent: with the stacked [B_1 B_2 ..] = Q T and
[A_1; A_2; ..]^T = P W the mean is Q C P^T, and C and K are small float64 matrices. The energy of the discarded part is
summed there too, so `captured`, `dropped` and `error` are measured.

If the budget R cannot hold every direction, they are kept in this order (docs/decisions/0013-exact-means-exact.md):
those with votes, by K's eigenvalue; those without a vote where the mean exceeds rounding, by its energy there; last,
those that are nothing but rounding. This file is the reference; `fast` replaces it where that is safe.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from fedlora.errors import RankTie
from fedlora.linalg.basics import count_above, rank_tolerance, unit_roundoff
from fedlora.linalg.gauge import Canonical, gauge_fix
from fedlora.linalg.shapes import Float, Tensor
from fedlora.linalg.spectrum import Spectrum, cut_by_rounding, require_some, with_canonical_signs

Tie = Literal["energy", "paper", "error"]
Basis = Literal["projector", "energy"]

_U64 = unit_roundoff(torch.float64)
# The rounding of float64 arithmetic, relative to the terms: LAPACK's SVD of a graded matrix errs by some 50 roundoffs.
ARITHMETIC = 256 * _U64
# The precision of the votes' singular values, relative to the largest.
_RESOLVED = 1e-13


@dataclass(frozen=True, eq=False)
class Contributions:
    """What the clients of one round sent for one matrix.

    pairs: (B_i (d_out, r_i), A_i (r_i, d_in)) of each client, all in the compute dtype. weights: p_i. roundoffs: the
    unit roundoff of the dtype in which each arrived. tolerances: `rank_tolerance` of that dtype, or the user's value.
    rest: a part of the mean that belongs to no client and has no vote, already weighted; in the compute dtype.
    stored_in: the dtype of the result; None: the dtype of the pairs.
    """

    pairs: Sequence[tuple[Tensor, Tensor]]
    weights: Sequence[float]
    roundoffs: Sequence[float]
    tolerances: Sequence[float]
    rest: tuple[Tensor, Tensor] | None = None
    stored_in: torch.dtype | None = None

    @property
    def every_pair(self) -> list[tuple[Tensor, Tensor]]:
        """The clients' pairs, then the rest."""
        return [*self.pairs] if self.rest is None else [*self.pairs, self.rest]

    @property
    def ranks(self) -> list[int]:
        """The number of columns of each pair."""
        return [B.shape[1] for B, _ in self.every_pair]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the result."""
        return self.stored_in or self.every_pair[0][0].dtype

    @property
    def every_weight(self) -> list[float]:
        return [*self.weights] if self.rest is None else [*self.weights, 1.0]

    @property
    def every_tolerance(self) -> list[float]:
        return [*self.tolerances] if self.rest is None else [*self.tolerances, rank_tolerance(self.dtype)]

    def per_column(self, values: Sequence[float]) -> Float[Tensor, " S"]:
        """Repeats each pair's value for each of its columns. float64."""
        each = [x for x, r in zip(values, self.ranks, strict=True) for _ in range(r)]
        return torch.tensor(each, dtype=torch.float64).to(self.every_pair[0][0].device)


@dataclass(frozen=True)
class Budget:
    """How much of the mean is kept, and who chooses it.

    rank: R. tie: what to do if R cuts a block of equal eigenvalues, where TopEig_R is not unique. "energy": keep the
    directions of the block that hold most of the mean (unique again, least error). "paper": whatever the eigensolver
    returns. "error": raise `RankTie`. basis: "projector" (the paper) or "energy", the mean's strongest directions.
    """

    rank: int
    tie: Tie = "energy"
    basis: Basis = "projector"
    canonical: Canonical = "product"


@dataclass(frozen=True, eq=False)
class ConsensusMean:
    """The projected mean in energy order, and how it was cut.

    bases, alignments: for each client, U_i (d_out, k_i) and ||U_i^T u_j||^2 (l,) with each component; empty if the
    clients' own updates are not available.
    union_rank: the number of directions beyond rounding that R chose among. gap: (lambda_R - lambda_R+1) / lambda_R at
    the cut; inf if nothing was cut. tied: the cut went through eigenvalues that rounding cannot tell apart.
    captured: the share of the mean's energy in the result.
    dropped: the share lost for a reason other than R: directions taken for rounding, and rounding itself.
    error: ||result - mean|| / ||mean||, from the discarded part and rounding together; never below the true error, and
    at most twice the true error plus the roundoff of float64.
    rounding: the share of the result's energy in directions that rounding of the stored factors could have made.
    """

    spectrum: Spectrum
    bases: tuple[Tensor, ...]
    alignments: tuple[Tensor, ...]
    union_rank: int
    gap: float
    tied: bool
    captured: float
    dropped: float
    error: float
    rounding: float
    size: float


def consensus_mean(sent: Contributions, budget: Budget) -> ConsensusMean:
    """The mean of the clients' updates, within the budget.

    Raises:
        RankTie: with tie="error", if R cuts a tie.
    """
    p, pairs = sent.per_column(sent.every_weight), sent.every_pair
    core = _core(torch.cat([B for B, _ in pairs], dim=1), torch.cat([A for _, A in pairs], dim=0), p)
    blocks = list(zip(torch.split(core.left, sent.ranks, dim=1), torch.split(core.right, sent.ranks), strict=True))
    own = [
        gauge_fix(B, A, tolerance=tolerance, canonical=budget.canonical)[0]
        for (B, A), tolerance in zip(blocks, sent.tolerances, strict=False)  # `rest` has no vote
    ]
    columns = torch.cat([core.left[:, :0], *(U * math.sqrt(w) for U, w in zip(own, sent.weights, strict=True))], dim=1)
    owners = [k for k, U in enumerate(own) for _ in range(U.shape[1])]
    noise, roundoffs = (
        torch.tensor([x[k] for k in owners], dtype=torch.float64, device=columns.device)
        for x in ([t * t * w for t, w in zip(sent.tolerances, sent.weights, strict=True)], sent.roundoffs)
    )
    votes = _Votes(columns, noise, roundoffs)
    stored = float(torch.linalg.vector_norm(core.terms * sent.per_column(sent.every_tolerance)))
    made = _projected(core, votes, stored, budget, sent.dtype)
    bases = tuple(_lift(core.Q, U).to(sent.dtype) for U in own)
    alignments = tuple((U.mH @ made.directions).square().sum(dim=0) for U in own)
    return made.result(bases, alignments)


def consensus_of_sums(
    mean: Float[Tensor, "d_out d_in"],
    votes: Float[Tensor, "d_out d_out"] | None,
    doubts: Float[Tensor, "d_out d_out"] | None,
    budget: Budget,
    *,
    dtype: torch.dtype,
    roundoff: float,
    floor: float,
    terms: float,
) -> ConsensusMean:
    """Cuts a mean that was summed densely, without the clients' factors, to the budget.

    Args:
        mean: float64. votes, doubts: K, and sum_i (p_i tolerance_i)^2 U_i U_i^T, float64; None if the budget cuts
            nothing or goes by the mean's energy.
        dtype: of the result. roundoff: decides what counts as a tie; of all clients, by weight. With mixed dtypes, the
            widest would turn most cuts into ties, and the clients in the cut (`tie_tolerance`) are not known here.
        floor: the largest size that rounding of the stored factors can have in one direction of the mean. terms: the
            sizes of the summed terms.

    Raises:
        RankTie: as `consensus_mean`.
    """
    d_out = mean.shape[0]
    empty = mean.new_zeros(d_out, 0)
    root, noise, roundoffs = empty, empty[0], mean.new_tensor([roundoff])
    if votes is not None and doubts is not None:
        values, X = torch.linalg.eigh(votes)
        resolved = values > d_out * _U64 * values[-1].clamp(min=0)  # smaller values are rounding of K itself
        values, X = values[resolved], X[:, resolved]
        root, noise = X * values.sqrt(), (X * (doubts @ X)).sum(dim=0) / values
        roundoffs = roundoffs.expand(len(values))
    core = _Core(None, None, empty, empty, mean, empty[0], mean.new_tensor([terms]))
    return _projected(core, _Votes(root, noise, roundoffs), floor, budget, dtype).result((), ())


# ------------------------------------------------------------------------------------------------------- coordinates


@dataclass(frozen=True, eq=False)
class _Core:
    """The mean in orthonormal coordinates, float64: mean = Q C P^T with C = left diag(p) right.

    Q (d_out, m), P (d_in, n): orthonormal; None means the identity, if there are more columns than d. left (m, S): the
    stacked B's columns, scaled by `scale` (S,) to a norm in [1, 2). right (S, n): the stacked A's rows, scaled by its
    inverse. terms (S,): p_j ||b_j|| ||a_j||, the sizes of the summed terms.
    """

    Q: Tensor | None
    P: Tensor | None
    left: Tensor
    right: Tensor
    C: Tensor
    scale: Tensor
    terms: Tensor


@dataclass(frozen=True, eq=False)
class _Votes:
    """K = columns columns^T, in coordinates. columns (m, S_v): sqrt(p_i) U_i. For each column's client: noise (S_v,) is
    p_i tolerance_i^2, roundoffs (S_v,) the unit roundoff of the dtype in which it arrived."""

    columns: Tensor
    noise: Tensor
    roundoffs: Tensor


def _core(B: Tensor, A: Tensor, p: Tensor) -> _Core:
    B, A = B.double(), A.double()
    norms = torch.linalg.vector_norm(B, dim=0)
    scale = torch.where(norms > 0, torch.exp2(-torch.floor(torch.log2(norms))), 1.0)
    terms = p * norms * torch.linalg.vector_norm(A, dim=1)
    B, A = B * scale, A / scale[:, None]
    Q, left = torch.linalg.qr(B) if B.shape[0] > B.shape[1] else (None, B)
    P, right = torch.linalg.qr(A.mH) if A.shape[1] > A.shape[0] else (None, A.mH)
    right = right.mH
    return _Core(Q, P, left, right, (left * p) @ right, scale, terms)


def _lift(basis: Tensor | None, coordinates: Tensor) -> Tensor:
    return coordinates if basis is None else basis @ coordinates


# --------------------------------------------------------------------------------------------------------- the cut


@dataclass(frozen=True, eq=False)
class _Chosen:
    """basis (m, keep): coordinates of U_ref. left_out: the mean's energy outside it. dropped: the part of `left_out`
    that R did not cause."""

    basis: Tensor
    union_rank: int
    gap: float
    tied: bool
    left_out: float
    dropped: float


def _chosen(votes: _Votes, C: Tensor, floor: float, budget: Budget) -> _Chosen:
    """U_ref in coordinates. floor: the largest size that rounding can have in one direction of the mean."""
    X, s = _every_direction(votes.columns)
    voted = count_above(s, _RESOLVED * float(s[0])) if len(s) and s[0] > 0 else 0
    rest = X[:, voted:]
    if rest.shape[1]:
        X = torch.cat([X[:, :voted], rest @ _left_vectors(rest.mH @ C)], dim=1)
    energy = (X.mH @ C).square().sum(dim=1)
    loud = energy.sqrt() > floor
    certain = torch.zeros(X.shape[1], dtype=torch.bool, device=X.device)
    # Differences between clients that share a direction are made of rounding, so these clients' own noise counts there.
    shares = (votes.columns.mH @ X[:, :voted]).square() / s[:voted].square()
    certain[:voted] = s[:voted].square() > votes.noise @ shares
    sound = certain | loud
    by_vote = sound.clone()
    by_vote[voted:] = False
    first, second = by_vote.nonzero()[:, 0], (sound & ~by_vote).nonzero()[:, 0]
    last = (~sound).nonzero()[:, 0]
    last = last[torch.argsort(energy[last], descending=True, stable=True)]
    order = torch.cat([first, second, last])
    union, keep = len(first) + len(second), min(budget.rank, X.shape[1])
    X, energy, sound = X[:, order], energy[order], sound[order]
    gap, tied = math.inf, False
    if keep < len(first):
        values = s[first].square()
        gap = float((values[keep - 1] - values[keep]) / values[keep - 1])
        at = slice(keep - 1, keep + 1)
        tolerance = tie_tolerance(votes.columns, X[:, at], values[at], votes.roundoffs)
        tied = gap <= tolerance
        X, energy = _untied(X, energy, values, keep, tolerance, C, budget) if tied else (X, energy)
    elif keep < union:
        gap = float((energy[keep - 1] - energy[keep]) / energy[keep - 1]) if keep > len(first) else 1.0
    out = slice(keep, None)
    return _Chosen(X[:, :keep], union, gap, tied, float(energy[out].sum()), float(energy[out][~sound[out]].sum()))


def _every_direction(votes: Tensor) -> tuple[Tensor, Tensor]:
    """All left singular vectors (m, m) of the votes and their singular values (m,), zero where there are no votes."""
    m = votes.shape[0]
    if votes.shape[1] == 0:
        return torch.eye(m, dtype=votes.dtype, device=votes.device), votes.new_zeros(m)
    wide = votes.shape[1] > m
    X, s, _ = torch.linalg.svd(torch.linalg.qr(votes.mH, mode="r").R.mH if wide else votes, full_matrices=True)
    return X, torch.cat([s, s.new_zeros(m - len(s))])


def _left_vectors(X: Tensor) -> Tensor:
    """All left singular vectors, square."""
    O: Tensor = torch.linalg.svd(X, full_matrices=X.shape[1] < X.shape[0])[0]
    return O


def tie_tolerance(votes: Tensor, directions: Tensor, eigenvalues: Tensor, roundoffs: Tensor) -> float:
    """The relative gap under which the two eigenvalues at the cut count as equal: sqrt(u), u of the clients in the cut.

    An eigenvalue is a sum of its clients' votes, and moves by the roundoff of each times its share. A cut inside a gap
    g moves by u / g, so below sqrt(u) it keeps fewer than half of the digits. docs/decisions/0004-ties.md.
    """
    shares = (votes.mH @ directions).square() / eigenvalues
    return float((roundoffs @ shares).max().sqrt())


def tied_block(values: Tensor, keep: int, tolerance: float) -> slice:
    """The range of eigenvalues (descending) that equal the one at the cut."""
    at_cut = values[keep - 1]
    inside = ((values - at_cut).abs() <= tolerance * at_cut).nonzero()
    return slice(int(inside[0]), int(inside[-1]) + 1)


def _untied(
    X: Tensor, energy: Tensor, values: Tensor, keep: int, tolerance: float, C: Tensor, budget: Budget
) -> tuple[Tensor, Tensor]:
    """X and energy with the tied block rotated, so that its strongest directions come first."""
    at_cut = float(values[keep - 1])
    if budget.tie == "error":
        raise RankTie(
            f"the rank budget R = {budget.rank} cuts a block of equal consensus eigenvalues ({at_cut:.6g}, equal to "
            f"{tolerance:.1e}), so the top-{budget.rank} subspace is not unique. Raise R (the union of the client "
            f"subspaces has rank {len(values)}), or use tie='energy'."
        )
    if budget.tie == "paper":
        return X, energy
    block = tied_block(values, keep, tolerance)
    X = X.clone()
    X[:, block] = X[:, block] @ _left_vectors(X[:, block].mH @ C)
    return X, (X.mH @ C).square().sum(dim=1)


# ------------------------------------------------------------------------------------------------------ the result


@dataclass(frozen=True, eq=False)
class _Projected:
    """The result, and `directions` (m, l): its left singular vectors in coordinates."""

    spectrum: Spectrum
    directions: Tensor
    chosen: _Chosen
    captured: float
    dropped: float
    error: float
    rounding: float
    size: float

    def result(self, bases: tuple[Tensor, ...], alignments: tuple[Tensor, ...]) -> ConsensusMean:
        c = self.chosen
        return ConsensusMean(
            self.spectrum, bases, alignments, c.union_rank, c.gap, c.tied,
            self.captured, self.dropped, self.error, self.rounding, self.size,
        )  # fmt: skip


def _projected(core: _Core, votes: _Votes, stored: float, budget: Budget, dtype: torch.dtype) -> _Projected:
    """stored: the largest size that rounding of the stored factors can have in one direction of the mean."""
    largest = float(core.C.abs().max()) if core.C.numel() else 0.0
    unit = 2.0 ** math.floor(math.log2(largest)) if largest else 1.0  # squares of tiny numbers would underflow
    C, terms, stored = core.C / unit, float(torch.linalg.vector_norm(core.terms / unit)), stored / unit
    energy = float(C.square().sum())
    if budget.basis == "energy":
        chosen = _strongest(C, budget, stored, votes.roundoffs)
    else:
        chosen = _chosen(votes, C, stored, budget)
    whole = chosen.basis.shape[1] == C.shape[0]  # then no basis is needed, and none adds rounding
    O, s, Wh = torch.linalg.svd(C if whole else chosen.basis.mH @ C, full_matrices=False)
    kept, level, rounding = cut_by_rounding(s.tolist(), terms=terms, stored=stored, stored_in=dtype)
    require_some(s[:kept] * unit, dtype)
    trimmed = float(s[kept:].square().sum())
    O, s, Wh = O[:, :kept], s[:kept], Wh[:kept]
    directions = O if whole else chosen.basis @ O
    U, Vh = _lift(core.Q, directions), _lift(core.P, Wh.mH).mH
    stored_U, stored_s, stored_Vh = U.to(dtype), (s * unit).to(dtype), Vh.to(dtype)
    root = (s * unit).sqrt()
    sides = ((U.mH, stored_U.mH), (Vh, stored_Vh))
    of_U, of_Vh = (rounding_of(x.clone(), y, root, stored_s.sqrt()).sqrt() for x, y in sides)
    off = float(storing_error(of_U, of_Vh, root)) / unit
    off += ARITHMETIC * terms  # an upper bound on rounding in float64 arithmetic
    spectrum = with_canonical_signs(stored_U.clone(), stored_s, stored_Vh.clone(), level * unit, rounding)
    if kept == 0:  # exact cancellation, or nothing was sent: shares of the mean are undefined
        return _Projected(spectrum, directions, chosen, 1.0, 0.0, 0.0, 0.0, 0.0)
    captured, dropped, error = accounts(
        energy, left_out=chosen.left_out + trimmed, dropped=chosen.dropped + trimmed, off=off
    )
    return _Projected(spectrum, directions, chosen, captured, dropped, error, rounding, math.sqrt(energy) * unit)


def _strongest(C: Tensor, budget: Budget, stored: float, roundoffs: Tensor) -> _Chosen:
    """The top-R left singular vectors of the mean itself: least error, unbounded influence.

    gap: between squared singular values. Source: the paper's conclusion names this as future work.
    """
    O, s, _ = torch.linalg.svd(C, full_matrices=False)
    energy, keep = s.square(), min(budget.rank, len(s))
    union = count_above(s, min(stored, float(s[0]) / 2)) if len(s) else 0
    gap, tied = math.inf, False
    if keep < union:
        gap = float(1 - energy[keep] / energy[keep - 1])
        tied = gap <= math.sqrt(float(roundoffs.max())) if len(roundoffs) else False
    return _Chosen(O[:, :keep], union, gap, tied, float(energy[keep:].sum()), 0.0)


def rounding_of(exact: Tensor, stored: Tensor, root: Tensor, stored_root: Tensor) -> Tensor:
    """The squared error (*, l) in each column of (U sqrt(s)) (sqrt(s) Vh) from storing one side (*, l, d), U^T or Vh.

    `effective` returns that product, so the rounding of forming it counts too. root, stored_root (*, l): sqrt(s) of
    the exact and of the stored spectrum. `exact` (float64) is overwritten.
    """
    made = stored * stored_root[..., None]
    off: Tensor = torch.linalg.vector_norm(exact.mul_(root[..., None]).sub_(made.double()), dim=-1)
    return off.square_()


def storing_error(of_U: Tensor, of_Vh: Tensor, root: Tensor) -> Tensor:
    """Bounds ||stored - exact||_F from the rounding of each column of U sqrt(s) and row of sqrt(s) Vh (*, l).

    By the triangle inequality; two independent roundings together are 1 / sqrt(2) of their sum.
    """
    both: Tensor = torch.linalg.vector_norm(of_U * root, dim=-1) + torch.linalg.vector_norm(of_Vh * root, dim=-1)
    return both


def accounts(energy: float, *, left_out: float, dropped: float, off: float) -> tuple[float, float, float]:
    """(captured, dropped, error) of a result. energy, left_out, dropped: squared norms of the mean, of its discarded
    part, and of the share of that which R did not cause. off: the norm of the rounding errors."""
    lost = (math.sqrt(left_out) + off) ** 2 / energy * (1 + 1e-12)
    return max(1 - lost, 0.0), min((math.sqrt(dropped) + off) ** 2 / energy, 1.0), math.sqrt(lost)
