"""Replaces `consensus.consensus_mean` where that is safe: matrices of one shape at once, from Gram matrices in float64.

It uses the same coordinates, but from a Cholesky factor of the columns' Gram matrix instead of a QR: [B_1 B_2 ..] D =
Q T, with T^T T the Gram matrix; Q = B D T^-1 is never formed. The mean is then Q (T w A), and U and V^T take one tall
product each. Safe means: float32, columns far from dependent, every client's rank beyond doubt, no tie at the cut. All
other matrices go to `consensus_mean`, one by one. `tests/linalg/test_consensus.py` compares the two on every hard
family.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedlora.linalg.basics import PANEL, eigh, gram, unit_roundoff
from fedlora.linalg.batches import in_batches, stacked
from fedlora.linalg.consensus import (
    ARITHMETIC,
    Budget,
    ConsensusMean,
    Contributions,
    accounts,
    consensus_mean,
    rounding_of,
    storing_error,
    tie_tolerance,
    tied_block,
)
from fedlora.linalg.parallel import Each, one_by_one
from fedlora.linalg.spectrum import Spectrum, canonical_signs, cut_by_rounding

_U64 = unit_roundoff(torch.float64)
# The least pivot for columns of norm 1. Results from their Gram matrix are orthonormal to 1e-16 over its square.
_LEAST_PIVOT, _CERTAIN_PIVOT = 1e-4, 0.1
# Bytes of a batch's factor in float64. Tall matrices are processed in panels, small ones all at once.
_AT_ONCE = 2**22
# The smallest singular value, relative to the largest, that an eigenproblem of the mean's square gives accurately on
# both sides; and the least size of the largest one, relative to the summed terms.
_LEAST_OF_MEAN, _LEAST_OF_TERMS = 1e-4, 1e-2


def consensus_means(
    sent: Sequence[Contributions], budgets: Sequence[Budget], each: Each = one_by_one
) -> list[ConsensusMean]:
    """[consensus_mean(...) for each matrix]. each: runs the batches; how it runs them does not change the batches.

    Raises:
        RankTie: as `consensus_mean`.
    """
    kinds = [_kind(s, budget) for s, budget in zip(sent, budgets, strict=True)]
    ordinary = [k for k, kind in enumerate(kinds) if kind is not None]
    found = in_batches(
        lambda at: _Batch.of([sent[ordinary[k]] for k in at]).means(budgets[ordinary[at[0]]]),
        [kinds[k] for k in ordinary],
        [8 * sum(sent[k].ranks) * max(len(sent[k].pairs[0][0]), sent[k].pairs[0][1].shape[1]) for k in ordinary],
        each,
        most=_AT_ONCE,
    )
    made = {k: mean for k, mean in zip(ordinary, found, strict=True) if mean is not None}
    # The usual reason for None is a client that sent nothing for a matrix: try again without such clients.
    others = [k for k in range(len(sent)) if k not in made]
    active = {k: [bool(B.any()) for B, _ in sent[k].pairs] for k in others}
    some = [k for k in others if any(active[k]) and not all(active[k])]
    if some:
        without = consensus_means([_only(sent[k], active[k]) for k in some], [budgets[k] for k in some], each)
        made |= {k: _with_idle(mean, sent[k], active[k]) for k, mean in zip(some, without, strict=True)}
    others = [k for k in others if k not in made]
    made |= dict(zip(others, each(lambda k: consensus_mean(sent[k], budgets[k]), others), strict=True))
    return [made[k] for k in range(len(sent))]


def _kind(sent: Contributions, budget: Budget) -> tuple[object, ...] | None:
    """A key that the matrices of one batch share; None for a matrix that goes to the reference."""
    B, A = sent.every_pair[0]
    narrow = B.dtype == sent.dtype == torch.float32
    ordinary = narrow and budget.basis == "projector" and min(sent.weights, default=0) > 0
    if not ordinary or not 0 < min(sent.ranks) <= max(sent.ranks) <= min(len(B), A.shape[1]):
        return None
    return B.device, len(B), A.shape[1], tuple(sent.ranks), sent.rest is None, budget


def _only(sent: Contributions, active: Sequence[bool]) -> Contributions:
    """The contributions of the active clients alone."""
    at = [k for k, on in enumerate(active) if on]
    pairs, weights = [sent.pairs[k] for k in at], [sent.weights[k] for k in at]
    roundoffs, tolerances = [sent.roundoffs[k] for k in at], [sent.tolerances[k] for k in at]
    return Contributions(pairs, weights, roundoffs, tolerances, sent.rest, sent.stored_in)


def _with_idle(mean: ConsensusMean, sent: Contributions, active: Sequence[bool]) -> ConsensusMean:
    """The same mean with an empty basis for each client whose update is zero."""
    bases, alignments = iter(mean.bases), iter(mean.alignments)
    empty, none = sent.pairs[0][0][:, :0], mean.spectrum.s.new_zeros(mean.spectrum.rank, dtype=torch.float64)
    return replace(
        mean,
        bases=tuple(next(bases) if on else empty for on in active),
        alignments=tuple(next(alignments) if on else none for on in active),
    )


@dataclass(frozen=True, eq=False)
class _Clients:
    """The clients' columns, block by block; blocks of lower rank are padded with zero columns to the largest r.

    at (c, r): the columns' indices, S for padding. own (m, c, r, r): the lower Cholesky factors of their Gram matrices,
    so that B_i D = U_i own^T; 1 on the diagonal for padding.
    """

    at: Tensor
    own: Tensor


@dataclass(frozen=True, eq=False)
class _Cut:
    """P (m, mm, R): coordinates of U_ref; None if nothing is cut. gaps, tied: one for each matrix."""

    P: Tensor | None
    gaps: list[float]
    tied: list[bool]


@dataclass(frozen=True, eq=False)
class _Batch:
    """m matrices of one shape, with their clients' factors side by side and the rest last.

    B (m, d_out, S), A (m, S, d_in): float32; products cast them to float64 panel by panel. All others are float64:
    scale (m, S): D, which scales B's columns to norm 1. w (m, S): p / D. sizes (m, S): ||a_j||. H: Gram of A's rows,
    None if S > d_in. T (m, mm, S): B D in coordinates; B D itself if S > d_out.
    """

    sent: Sequence[Contributions]
    B: Tensor
    A: Tensor
    scale: Tensor
    w: Tensor
    sizes: Tensor
    H: Tensor | None
    T: Tensor
    clients: _Clients
    sound: Tensor

    @classmethod
    def of(cls, sent: Sequence[Contributions]) -> _Batch:
        pairs = [s.every_pair for s in sent]
        B = torch.cat([stacked([B for B, _ in each]) for each in zip(*pairs, strict=True)], dim=2)
        S = B.shape[2]
        A = torch.cat([A for each in pairs for _, A in each]).reshape(len(sent), S, -1)
        G, H = (gram(B) if B.shape[1] >= S else None), (gram(A.mT) if A.shape[2] >= S else None)
        lengths = _diagonal(G) if G is not None else B.double().square().sum(dim=1)
        sizes = (_diagonal(H) if H is not None else A.double().square().sum(dim=2)).sqrt()
        scale = lengths.clamp(min=1e-300).rsqrt()
        p = torch.stack([s.per_column(s.every_weight) for s in sent])
        sound = lengths.amin(dim=1) > 0
        if G is not None:
            G = scale[:, :, None] * G * scale[:, None, :]
            L, sound = _cholesky(G, sound)
            T = L.mT
        else:
            T = B.double() * scale[:, None, :]
        clients, sound = _own(sent, T, G, A, H, scale, sound)
        return cls(sent, B, A, scale, p / scale, sizes, H, T, clients, sound)

    def means(self, budget: Budget) -> list[ConsensusMean | None]:
        """One mean for each matrix; None if it is not safe."""
        mm, nothing_cut = self.T.shape[1], budget.rank >= self.T.shape[1]
        Tw = self.T * self.w[:, None, :]
        C = None
        if self.H is None:
            C = Tw @ self.A.double()  # (m, mm, d_in)
            square = C @ C.mT
        else:
            square = Tw @ self.H @ Tw.mT  # C C^T too
        total = _diagonal(square).sum(dim=1)
        terms = torch.linalg.vector_norm(self.w * self.sizes, dim=1)
        sound, cut = self.sound & torch.isfinite(total), _Cut(None, [math.inf] * len(total), [False] * len(total))
        if not nothing_cut:
            cut, sound = self._consensus(budget, square, sound)
            assert cut.P is not None
            square = cut.P.mT @ square @ cut.P
        values, O = eigh(square)
        rank = min(square.shape[1], self.A.shape[2])
        s, O = values.flip(1)[:, :rank].clamp(min=1e-300).sqrt(), O.flip(2)[:, :, :rank]
        sound = sound & (s[:, 0] > _LEAST_OF_TERMS * terms)
        left_out = torch.zeros_like(total)
        if not nothing_cut:  # a difference of two sums cannot resolve less than this
            left_out = total - values.sum(dim=1) + 64 * _U64 * total
            sound = sound & (left_out > 1e-11 * total)
        if not bool(sound.any()):
            return [None] * len(self.sent)
        directions = O if cut.P is None else cut.P @ O
        rows = directions.mT @ (Tw if C is None else C)  # s V^T, in coordinates of A's rows if C is None
        Vh = None
        weak = s < _LEAST_OF_MEAN * s[:, :1]
        if bool((weak.any(dim=1) & sound).any()):
            Vh = self._with_weak_ones(weak, directions, s, rows, exact=C is not None)
        Ut, off_U = _stored(*self._left(directions), s)
        if Vh is None and C is None:
            Vh, off_V = _stored(rows / s[:, :, None], self.A, s)
        else:
            Vh, off_V = _stored(rows / s[:, :, None] if Vh is None else Vh, None, s)
        return self._results(Ut, s, Vh, (off_U, off_V), directions, total, left_out, terms, cut, sound, mm)

    def _consensus(self, budget: Budget, square: Tensor, sound: Tensor) -> tuple[_Cut, Tensor]:
        """The top-R eigenvectors of K in coordinates, and the matrices for which they are reliable."""
        at, own = self.clients.at, self.clients.own
        bases = torch.linalg.solve_triangular(own, _blocks(self.T, at).mT, upper=False).mT  # U_i
        root = torch.tensor([s.weights for s in self.sent], dtype=torch.float64).sqrt()
        bases = bases * root.to(own)[:, :, None, None]
        votes = self.T.new_zeros(*self.T.shape[:2], self.T.shape[2] + 1)  # `rest` has no vote
        votes[:, :, at.flatten()] = bases.transpose(1, 2).flatten(2)
        votes = votes[:, :, :-1]
        values, X = eigh(votes @ votes.mT)
        values, X = values.flip(1), X.flip(2)
        noise = torch.tensor(
            [sum(p * t * t for p, t in zip(s.weights, s.tolerances, strict=True)) for s in self.sent],
            dtype=torch.float64,
        ).to(values)
        R = budget.rank
        sound = sound & (values[:, -1] > torch.maximum(4 * noise, 1e-10 * values[:, 0]))
        gaps, tied = (1 - values[:, R] / values[:, R - 1]).tolist(), [False] * len(values)
        for k, s in enumerate(self.sent):  # the round's widest roundoff bounds every tie tolerance
            if gaps[k] <= max(s.roundoffs) ** 0.5 and bool(sound[k]):
                roundoffs = s.per_column([*s.roundoffs, *[0.0] * (s.rest is not None)])
                tolerance = tie_tolerance(votes[k], X[k, :, R - 1 : R + 1], values[k, R - 1 : R + 1], roundoffs)
                tied[k] = gaps[k] <= tolerance
                if tied[k] and budget.tie == "energy":
                    block = tied_block(values[k], R, tolerance)
                    _, turn = eigh(X[k, :, block].mT @ square[k] @ X[k, :, block])
                    X[k, :, block] = X[k, :, block] @ turn.flip(1)
                elif tied[k] and budget.tie == "error":
                    sound[k] = False  # the reference raises the error
        return _Cut(X[:, :, :R], gaps, tied), sound

    def _with_weak_ones(self, weak: Tensor, directions: Tensor, s: Tensor, rows: Tensor, *, exact: bool) -> Tensor:
        """Vh (m, l, d_in) if some components are so weak that rows / s is not orthonormal. Changes directions and s.

        The eigenvectors of C C^T give the span of the weak components to 1e-8, but not each component. So their rows,
        made orthogonal to the strong ones, are decomposed again.
        """
        Vh = torch.empty(*rows.shape[:2], self.A.shape[2], dtype=torch.float64, device=rows.device)
        for k in range(len(weak)):
            strong = int((~weak[k]).sum())
            if exact:
                Vh[k] = rows[k]
            else:
                torch.matmul(rows[k], self.A[k].double(), out=Vh[k])
            Vh[k, :strong] /= s[k, :strong, None]
            if strong == Vh.shape[1]:
                continue
            Q, R = torch.linalg.qr((Vh[k, strong:] - (Vh[k, strong:] @ Vh[k, :strong].mT) @ Vh[k, :strong]).mT)
            O, values, Wh = torch.linalg.svd(R.mT)
            directions[k, :, strong:] = directions[k, :, strong:] @ O
            s[k, strong:] = values.clamp(min=1e-300)
            Vh[k, strong:] = Wh @ Q.mT
        return Vh

    def _left(self, directions: Tensor) -> tuple[Tensor, Tensor | None]:
        """The two factors from which `_stored` makes U^T."""
        if self.B.shape[2] > self.B.shape[1]:
            return directions.mT, None
        inner = torch.linalg.solve_triangular(self.T, directions, upper=True)
        return (self.scale[:, :, None] * inner).mT, self.B.mT

    def _results(
        self, Ut: Tensor, s: Tensor, Vh: Tensor, off: tuple[Tensor, Tensor], directions: Tensor,
        total: Tensor, left_out: Tensor, terms: Tensor, cut: _Cut, sound: Tensor, mm: int,
    ) -> list[ConsensusMean | None]:  # fmt: skip
        tolerances = torch.stack([s.per_column(s.every_tolerance) for s in self.sent])
        floors = torch.linalg.vector_norm(tolerances * self.w * self.sizes, dim=1)
        sign = canonical_signs(Ut.mT)
        Ut, Vh, single = Ut.mul_(sign[:, :, None]), Vh.mul_(sign[:, :, None]), s.float()
        U = _turned(Ut)  # row-major, like Vh, for readouts and files
        bases, alignments = self._clients(directions)
        cost = storing_error(off[0], off[1], s.sqrt()) + ARITHMETIC * terms
        numbers = [x.tolist() for x in (total, left_out, terms, floors, cost, sound, single[:, 0] > 0, s)]
        results: list[ConsensusMean | None] = [None] * len(self.sent)
        for k, (energy, out, size, floor, off_by, safe, some, values) in enumerate(zip(*numbers, strict=True)):
            if not safe or not some:
                continue
            keep, noise, rounding = cut_by_rounding(values, terms=size, stored=floor, stored_in=torch.float32)
            if keep == 0:
                continue
            trimmed = math.fsum(x * x for x in values[keep:])
            captured, dropped, error = accounts(energy, left_out=out + trimmed, dropped=trimmed, off=off_by)
            spectrum = Spectrum(U[k], single[k], Vh[k], noise, rounding)
            along = alignments[k]
            if keep < len(values):
                spectrum, along = spectrum.head(keep), [a[:keep] for a in along]
                spectrum = replace(spectrum, U=spectrum.U.contiguous())
            results[k] = ConsensusMean(
                spectrum, tuple(bases[k]), tuple(along), mm, cut.gaps[k], cut.tied[k],
                captured, dropped, error, rounding, math.sqrt(energy),
            )  # fmt: skip
        return results

    def _clients(self, directions: Tensor) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """Each client's basis U_i and alignment ||U_i^T u_j||^2, matrix by matrix."""
        count = len(self.sent[0].pairs)
        bases = [[torch.empty(0)] * count for _ in self.sent]
        alignments = [[torch.empty(0)] * count for _ in self.sent]
        at, own, ranks = self.clients.at, self.clients.own, self.sent[0].ranks
        along = pad(self.T.mT @ directions, (0, 0, 0, 1))[:, at]  # (B_i D)^T U
        scores = torch.linalg.solve_triangular(own, along, upper=False).square().sum(dim=2)
        D = torch.diag_embed(_filled(self.scale, at, 1.0))
        to_basis = torch.linalg.solve_triangular(own, D, upper=False).mT  # U_i = B_i to_basis_i
        # Histories are float32. If the columns are far from dependent, these products can be float32 too.
        dtype = torch.float32 if float(_diagonal(own).amin()) > _CERTAIN_PIVOT else torch.float64
        for i, B in enumerate(torch.split(self.B, ranks, dim=2)[:count]):
            # Each client gets its own memory, because its history lives for as long as the client stays away.
            each = (B.to(dtype) @ to_basis[:, i, : ranks[i], : ranks[i]].to(dtype)).float().unbind()
            for k, (basis, score) in enumerate(zip(each, scores[:, i].unbind(), strict=True)):
                bases[k][i], alignments[k][i] = basis, score
        return bases, alignments


def _own(
    sent: Sequence[Contributions],
    T: Tensor,
    G: Tensor | None,
    A: Tensor,
    H: Tensor | None,
    scale: Tensor,
    sound: Tensor,
) -> tuple[_Clients, Tensor]:
    """The clients, and which matrices have, beyond rounding, factors of full rank from every client."""
    S, ranks = T.shape[2], sent[0].ranks[: len(sent[0].pairs)]
    r, starts = max(ranks), accumulate(ranks, initial=0)
    at = torch.tensor([[*range(i, i + k), *[S] * (r - k)] for i, k in zip(starts, ranks, strict=False)]).to(T.device)
    filling = torch.diag_embed((at == S).to(T))
    of_B, of_A = _own_grams(T, G, at), _own_grams(A.mT, H, at)
    tolerance = torch.tensor([s.tolerances for s in sent], dtype=torch.float64).to(T)
    L, failed = torch.linalg.cholesky_ex(of_B + filling)
    fine = (failed == 0).all(dim=1)
    L = torch.where(fine[:, None, None, None], L, torch.eye(r).to(L))
    fine = fine & (_diagonal(L).amin(dim=2) > torch.clamp(4 * tolerance * r**0.5, min=1e-3)).all(dim=1)
    unscale = 1 / _filled(scale, at, 1.0)
    of_A = unscale[..., :, None] * of_A * unscale[..., None, :]
    squares = L.mT @ of_A @ L  # its eigenvalues are the squares of Ahat_i's singular values
    lengths = _diagonal(of_A).sqrt()
    level = torch.linalg.vector_norm(L.mT.abs() @ lengths[..., None], dim=(2, 3))
    least = torch.maximum(1e-12 * _diagonal(squares).sum(dim=2), (2 * tolerance * level).square())
    above = torch.diag_embed(torch.where(at == S, 1.0, -least[:, :, None]))
    _, failed = torch.linalg.cholesky_ex(squares + above)
    return _Clients(at, L), sound & fine & (failed == 0).all(dim=1)  # all of them above the least


def _own_grams(X: Tensor, gram_of_all: Tensor | None, at: Tensor) -> Tensor:
    """X_i^T X_i (m, c, r, r) of the clients' columns of X (m, n, S), cut from the Gram matrix of all if it is given."""
    if gram_of_all is None:
        own = _blocks(X, at).double()
        return own.mT @ own
    return pad(gram_of_all, (0, 1, 0, 1))[:, at[:, :, None], at[:, None, :]]


def _blocks(X: Tensor, at: Tensor) -> Tensor:
    """The columns `at` (c, r) of X (m, n, S), block by block (m, c, n, r)."""
    return pad(X, (0, 1))[:, :, at.flatten()].reshape(*X.shape[:2], *at.shape).transpose(1, 2)


def _filled(each: Tensor, at: Tensor, by: float) -> Tensor:
    """The columns' numbers (m, S), block by block (m, c, r)."""
    return pad(each, (0, 1), value=by)[:, at]


def _turned(X: Tensor) -> Tensor:
    """X^T of each (m, l, d), row-major. Torch transposes large matrices three times faster one by one."""
    turned = X.new_empty(X.shape[0], X.shape[2], X.shape[1])
    if X[0].numel() < PANEL // 8:
        return turned.copy_(X.mT)
    for there, one in zip(turned, X, strict=True):
        there.copy_(one.mT)
    return turned


def _diagonal(X: Tensor) -> Tensor:
    return X.diagonal(dim1=-2, dim2=-1)


def _cholesky(G: Tensor, sound: Tensor) -> tuple[Tensor, Tensor]:
    """L with G = L L^T for matrices with a unit diagonal, and which sound matrices are still sound."""
    L, failed = torch.linalg.cholesky_ex(G)
    L = torch.where(failed[:, None, None] > 0, torch.eye(L.shape[1]).to(L), L)  # never used, but must be finite
    return L, sound & (failed == 0) & (_diagonal(L).amin(dim=1) > _LEAST_PIVOT)


def _stored(small: Tensor, tall: Tensor | None, s: Tensor) -> tuple[Tensor, Tensor]:
    """small (m, l, S) @ tall (m, S, d), U^T or V^T, stored in float32, and its `rounding_of` (m, l). tall: float32; if
    None, `small` is the product already and is overwritten. Works in panels, so that each panel stays in cache."""
    root, stored_root, off = s.sqrt(), s.float().sqrt(), torch.zeros_like(s)
    d = (small if tall is None else tall).shape[2]
    made = torch.empty(*small.shape[:2], d, dtype=torch.float32, device=small.device)
    for k, at in _panels(*made.shape):
        exact = small[k, :, at].clone() if tall is None else small[k] @ tall[k, :, at].double()
        made[k, :, at] = exact
        off[k] += rounding_of(exact, made[k, :, at], root[k], stored_root[k])
    return made, off.sqrt()


def _panels(m: int, S: int, d: int) -> Iterator[tuple[slice, slice]]:
    """Splits (m, S, d) into slices of matrices and columns of about `PANEL` bytes."""
    columns = min(d, max(256, PANEL // (8 * S)))
    matrices = max(1, PANEL // (8 * S * columns))
    for first, start in product(range(0, m, matrices), range(0, d, columns)):
        yield slice(first, first + matrices), slice(start, start + columns)
