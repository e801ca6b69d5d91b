"""What runs in the place of `consensus.consensus_mean`: matrices of one shape at once, from Gram matrices in float64.

The same coordinates, by a Cholesky factor of the columns' Gram matrix instead of a QR: [B_1 B_2 ..] D = Q T with
T^T T their Gram matrix, Q = B D T^-1 never formed. Then the mean is Q (T w A), and U and V^T are one tall product each.
It answers where that is safe: float32, columns not nearly dependent, every client's rank beyond doubt, no tie at the
cut. What is not goes to `consensus_mean`, one by one. `tests/linalg/test_consensus.py` compares them on every hard
family.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from fedlora.linalg.basics import eigh, gram, unit_roundoff
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
from fedlora.linalg.gauge import CACHED
from fedlora.linalg.parallel import Each, one_by_one
from fedlora.linalg.spectrum import Spectrum, cut_by_rounding, with_canonical_signs

_U64 = unit_roundoff(torch.float64)
# The least pivot of columns of norm 1. What is made from their Gram matrix is orthonormal to 1e-16 over its square.
_LEAST_PIVOT = 1e-4
# Singular values of the mean, relative to the largest, down to which an eigenproblem of its square does for both sides;
# and the least that the largest may be, relative to the terms that were added up.
_LEAST_OF_MEAN, _LEAST_OF_TERMS = 1e-4, 1e-2
# Rows of a tall product at a time: what is made of them stays in cache.
_PANEL = 1024


def consensus_means(
    sent: Sequence[Contributions], budgets: Sequence[Budget], each: Each = one_by_one
) -> list[ConsensusMean]:
    """[consensus_mean(...) for each matrix]. each: how to go through the batches, which are the same however that is.

    Raises:
        RankTie: as `consensus_mean`.
    """
    alike: dict[tuple[object, ...], list[int]] = {}
    for k, (s, budget) in enumerate(zip(sent, budgets, strict=True)):
        B, A = s.every_pair[0]
        narrow = B.dtype == s.dtype == torch.float32
        ordinary = narrow and budget.basis == "projector" and min(s.weights, default=0) > 0
        if ordinary and min(s.ranks) > 0 and max(s.ranks) <= min(len(B), A.shape[1]):
            shape = (B.device, len(B), A.shape[1], tuple(s.ranks), s.rest is None)
            alike.setdefault((shape, budget), []).append(k)
    batches = []
    for members in alike.values():
        s = sent[members[0]]
        at_once = max(1, CACHED // (8 * sum(s.ranks) * max(len(s.every_pair[0][0]), s.every_pair[0][1].shape[1])))
        batches += [members[first : first + at_once] for first in range(0, len(members), at_once)]
    found = each(lambda batch: _Batch.of([sent[k] for k in batch]).means(budgets[batch[0]]), batches)
    made: dict[int, ConsensusMean] = {}
    for members, means in zip(batches, found, strict=True):
        made |= {k: mean for k, mean in zip(members, means, strict=True) if mean is not None}
    # Clients that sent nothing for a matrix are what most often keeps it from here: once more without them.
    others = [k for k in range(len(sent)) if k not in made]
    active = {k: [bool(B.any()) for B, _ in sent[k].pairs] for k in others}
    some = [k for k in others if any(active[k]) and not all(active[k])]
    if some:
        without = consensus_means([_only(sent[k], active[k]) for k in some], [budgets[k] for k in some], each)
        made |= {k: _with_idle(mean, sent[k], active[k]) for k, mean in zip(some, without, strict=True)}
    others = [k for k in others if k not in made]
    made |= dict(zip(others, each(lambda k: consensus_mean(sent[k], budgets[k]), others), strict=True))
    return [made[k] for k in range(len(sent))]


def _only(sent: Contributions, active: Sequence[bool]) -> Contributions:
    """What those of the clients sent that are active."""
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
class _Alike:
    """The clients of one rank r in a batch. at (c, r): their columns. own (m, c, r, r): the Cholesky factors of their
    columns' Gram matrices, lower, so that B_i D = U_i own^T."""

    clients: list[int]
    at: Tensor
    own: Tensor


@dataclass(frozen=True, eq=False)
class _Cut:
    """P (m, mm, R): coordinates of U_ref; None where nothing is cut. gaps, tied: of each matrix."""

    P: Tensor | None
    gaps: list[float]
    tied: list[bool]


@dataclass(frozen=True, eq=False)
class _Batch:
    """m matrices of one shape, their clients' factors side by side, the rest behind them; float64.

    B (m, d_out, S), A (m, S, d_in). scale (m, S): D, which makes B's columns 1 long. w (m, S): p / D. sizes (m, S):
    ||a_j||. G: Gram of B D, or None where S > d_out; H: Gram of A's rows, or None where S > d_in. T (m, mm, S).
    """

    sent: Sequence[Contributions]
    B: Tensor
    A: Tensor
    scale: Tensor
    w: Tensor
    sizes: Tensor
    H: Tensor | None
    T: Tensor
    alike: list[_Alike]
    sound: Tensor

    @classmethod
    def of(cls, sent: Sequence[Contributions]) -> _Batch:
        B = _stacked([torch.cat([B for B, _ in s.every_pair], dim=1) for s in sent]).double()
        A = _stacked([torch.cat([A for _, A in s.every_pair], dim=0) for s in sent]).double()
        S = B.shape[2]
        G, H = (gram(B) if B.shape[1] >= S else None), (gram(A.mT) if A.shape[2] >= S else None)
        lengths = _diagonal(G) if G is not None else B.square().sum(dim=1)
        sizes = (_diagonal(H) if H is not None else A.square().sum(dim=2)).sqrt()
        scale = lengths.clamp(min=1e-300).rsqrt()
        p = torch.stack([s.per_column(s.every_weight) for s in sent])
        sound = lengths.amin(dim=1) > 0
        if G is not None:
            G = scale[:, :, None] * G * scale[:, None, :]
            L, sound = _cholesky(G, sound)
            T = L.mT
        else:
            T = B * scale[:, None, :]
        alike, sound = _own(sent, T, G, A, H, scale, sound)
        return cls(sent, B, A, scale, p / scale, sizes, H, T, alike, sound)

    def means(self, budget: Budget) -> list[ConsensusMean | None]:
        """One for each matrix, None where it is not safe."""
        mm, nothing_cut = self.T.shape[1], budget.rank >= self.T.shape[1]
        Tw = self.T * self.w[:, None, :]
        C = None
        if self.H is None:
            C = Tw @ self.A  # (m, mm, d_in)
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
        if not nothing_cut:  # a difference of two sums, which says no less than this
            left_out = total - values.sum(dim=1) + 64 * _U64 * total
            sound = sound & (left_out > 1e-11 * total)
        if not bool(sound.any()):
            return [None] * len(self.sent)
        directions = O if cut.P is None else cut.P @ O
        rows = directions.mT @ (Tw if C is None else C)  # s V^T in the coordinates of A's rows, or itself
        Vh = None
        weak = s < _LEAST_OF_MEAN * s[:, :1]
        if bool((weak.any(dim=1) & sound).any()):
            Vh = self._with_weak_ones(weak, directions, s, rows, exact=C is not None)
        roots = s.sqrt(), s.float().sqrt()
        U, off_U = self._left(directions, roots)
        if Vh is None and C is None:
            left = rows / s[:, :, None]
            Vh, off_V = _stored((left @ panel for panel in torch.split(self.A, _PANEL, dim=2)), roots, turned=True)
        else:
            Vh, off_V = _stored([rows / s[:, :, None] if Vh is None else Vh.clone()], roots, turned=True)
        return self._results(U, s, Vh, (off_U, off_V), directions, total, left_out, terms, cut, sound, mm)

    def _consensus(self, budget: Budget, square: Tensor, sound: Tensor) -> tuple[_Cut, Tensor]:
        """The top-R eigenvectors of K in coordinates, and where they may be trusted."""
        votes = torch.zeros_like(self.T)  # the rest has none
        for group in self.alike:
            own = torch.linalg.solve_triangular(group.own, self._columns(group).mT, upper=False).mT  # U_i
            root = torch.tensor([[s.weights[k] for k in group.clients] for s in self.sent], dtype=torch.float64).sqrt()
            own = own * root.to(own)[:, :, None, None]
            votes[:, :, group.at.flatten()] = own.transpose(1, 2).flatten(2)
        values, X = eigh(votes @ votes.mT)
        values, X = values.flip(1), X.flip(2)
        noise = torch.tensor(
            [sum(p * t * t for p, t in zip(s.weights, s.tolerances, strict=True)) for s in self.sent],
            dtype=torch.float64,
        ).to(values)
        R = budget.rank
        sound = sound & (values[:, -1] > torch.maximum(4 * noise, 1e-10 * values[:, 0]))
        gaps, tied = (1 - values[:, R] / values[:, R - 1]).tolist(), [False] * len(values)
        for k, s in enumerate(self.sent):  # none can be tied by more than the widest roundoff in the round
            if gaps[k] <= max(s.roundoffs) ** 0.5 and bool(sound[k]):
                roundoffs = s.per_column([*s.roundoffs, *[0.0] * (s.rest is not None)])
                tolerance = tie_tolerance(votes[k], X[k, :, R - 1 : R + 1], values[k, R - 1 : R + 1], roundoffs)
                tied[k] = gaps[k] <= tolerance
                if tied[k] and budget.tie == "energy":
                    block = tied_block(values[k], R, tolerance)
                    _, turn = eigh(X[k, :, block].mT @ square[k] @ X[k, :, block])
                    X[k, :, block] = X[k, :, block] @ turn.flip(1)
                elif tied[k] and budget.tie == "error":
                    sound[k] = False  # the reference says why
        return _Cut(X[:, :, :R], gaps, tied), sound

    def _with_weak_ones(self, weak: Tensor, directions: Tensor, s: Tensor, rows: Tensor, *, exact: bool) -> Tensor:
        """Vh (m, l, d_in) where some components are so weak that rows / s would not be orthonormal. Sets directions, s.

        The eigenvectors of C C^T know the span of the weak ones to a part in 1e8, but not each of them: their own rows,
        cleared of what the strong ones have, are solved again.
        """
        Vh = torch.empty(*rows.shape[:2], self.A.shape[2], dtype=torch.float64, device=rows.device)
        for k in range(len(weak)):
            strong = int((~weak[k]).sum())
            if exact:
                Vh[k] = rows[k]
            else:
                torch.matmul(rows[k], self.A[k], out=Vh[k])
            Vh[k, :strong] /= s[k, :strong, None]
            if strong == Vh.shape[1]:
                continue
            Q, R = torch.linalg.qr((Vh[k, strong:] - (Vh[k, strong:] @ Vh[k, :strong].mT) @ Vh[k, :strong]).mT)
            O, values, Wh = torch.linalg.svd(R.mT)
            directions[k, :, strong:] = directions[k, :, strong:] @ O
            s[k, strong:] = values.clamp(min=1e-300)
            Vh[k, strong:] = Wh @ Q.mT
        return Vh

    def _columns(self, group: _Alike) -> Tensor:
        """T's columns of each client of a group (m, c, mm, r)."""
        return _blocks(self.T, group.at)

    def _left(self, directions: Tensor, roots: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if self.B.shape[2] > self.B.shape[1]:
            return _stored([directions.clone()], roots)
        inner = torch.linalg.solve_triangular(self.T, directions, upper=True)
        right = self.scale[:, :, None] * inner
        return _stored((panel @ right for panel in torch.split(self.B, _PANEL, dim=1)), roots)

    def _results(
        self, U: Tensor, s: Tensor, Vh: Tensor, off: tuple[Tensor, Tensor], directions: Tensor,
        total: Tensor, left_out: Tensor, terms: Tensor, cut: _Cut, sound: Tensor, mm: int,
    ) -> list[ConsensusMean | None]:  # fmt: skip
        tolerances = torch.stack([s.per_column(s.every_tolerance) for s in self.sent])
        floors = torch.linalg.vector_norm(tolerances * self.w * self.sizes, dim=1)
        every = with_canonical_signs(U, s.float(), Vh)
        bases, alignments = self._clients(directions)
        cost = storing_error(off[0], off[1], s.sqrt()) + ARITHMETIC * terms
        numbers = [x.tolist() for x in (total, left_out, terms, floors, cost, sound, every.s[:, 0] > 0, s)]
        results: list[ConsensusMean | None] = [None] * len(self.sent)
        for k, (energy, out, size, floor, off_by, safe, some, values) in enumerate(zip(*numbers, strict=True)):
            if not safe or not some:
                continue
            keep, noise, rounding = cut_by_rounding(values, terms=size, stored=floor, stored_in=torch.float32)
            if keep == 0:
                continue
            trimmed = math.fsum(x * x for x in values[keep:])
            captured, dropped, error = accounts(energy, left_out=out + trimmed, dropped=trimmed, off=off_by)
            spectrum = Spectrum(every.U[k], every.s[k], every.Vh[k], noise, rounding)
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
        for group in self.alike:
            along = self._columns(group).mT @ directions[:, None]  # (B_i D)^T U
            scores = torch.linalg.solve_triangular(group.own, along, upper=False).square().sum(dim=2)
            D = torch.diag_embed(self.scale[:, group.at])
            to_basis = torch.linalg.solve_triangular(group.own, D, upper=False).mT  # U_i = B_i of it
            r, starts = group.at.shape[1], _starts(self.sent[0].ranks)
            for j, i in enumerate(group.clients):
                B = self.B[:, :, starts[i] : starts[i] + r]
                # One piece of memory for each client, for its history lives as long as it stays away.
                each = (B @ to_basis[:, j]).float().unbind()
                for k, (basis, score) in enumerate(zip(each, scores[:, j].unbind(), strict=True)):
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
) -> tuple[list[_Alike], Tensor]:
    """The clients by rank, and of which matrices all have factors of full rank, beyond what rounding can do."""
    ranks, starts = sent[0].ranks[: len(sent[0].pairs)], _starts(sent[0].ranks)
    alike = []
    for r in sorted(set(ranks)):
        clients = [i for i, rank in enumerate(ranks) if rank == r]
        at = torch.tensor([[*range(starts[i], starts[i] + r)] for i in clients], device=T.device)
        columns, rows = at[:, :, None], at[:, None, :]
        if G is not None:
            of_B = G[:, columns, rows]
        else:
            own = _blocks(T, at)
            of_B = own.mT @ own
        if H is not None:
            of_A = H[:, columns, rows]
        else:
            own = _blocks(A.mT, at).mT
            of_A = own @ own.mT
        tolerance = torch.tensor([[s.tolerances[i] for i in clients] for s in sent], dtype=torch.float64).to(T)
        L, failed = torch.linalg.cholesky_ex(of_B)
        fine = (failed == 0).all(dim=1)
        L = torch.where(fine[:, None, None, None], L, torch.eye(r).to(L))
        pivot = _diagonal(L).amin(dim=2)
        fine = fine & (pivot > torch.clamp(4 * tolerance * r**0.5, min=1e-3)).all(dim=1)
        unscale = 1 / scale[:, at]
        of_A = unscale[..., :, None] * of_A * unscale[..., None, :]
        used = torch.linalg.eigvalsh(L.mT @ of_A @ L)  # squares of Ahat_i's singular values
        lengths = _diagonal(of_A).sqrt()
        level = torch.linalg.vector_norm(L.mT.abs() @ lengths[..., None], dim=(2, 3))
        least = torch.maximum(1e-12 * used[..., -1], (2 * tolerance * level).square())
        sound = sound & fine & (used[..., 0] > least).all(dim=1)
        alike.append(_Alike(clients, at, L))
    return alike, sound


def _starts(ranks: Sequence[int]) -> list[int]:
    return [end - r for r, end in zip(ranks, accumulate(ranks), strict=True)]


def _blocks(X: Tensor, at: Tensor) -> Tensor:
    """The columns `at` (c, r) of X (m, n, S), block by block (m, c, n, r)."""
    return X[:, :, at.flatten()].reshape(*X.shape[:2], *at.shape).transpose(1, 2)


def _stacked(matrices: list[Tensor]) -> Tensor:
    return torch.stack(matrices) if len(matrices) > 1 else matrices[0][None]


def _diagonal(X: Tensor) -> Tensor:
    return X.diagonal(dim1=-2, dim2=-1)


def _cholesky(G: Tensor, sound: Tensor) -> tuple[Tensor, Tensor]:
    """L with G = L L^T of matrices with a diagonal of ones, and which of those that were sound still are."""
    L, failed = torch.linalg.cholesky_ex(G)
    L = torch.where(failed[:, None, None] > 0, torch.eye(L.shape[1]).to(L), L)  # not to be used, only to be finite
    return L, sound & (failed == 0) & (_diagonal(L).amin(dim=1) > _LEAST_PIVOT)


def _stored(panels: Iterable[Tensor], roots: tuple[Tensor, Tensor], *, turned: bool = False) -> tuple[Tensor, Tensor]:
    """A side (m, d, l) that comes in float64 in panels of rows, in float32, and what `rounding_of` says of it (m, l).
    Uses the panels up. turned: (m, l, d), in panels of columns."""
    made, off = [], torch.zeros_like(roots[0])
    for exact in panels:
        made.append(exact.float())
        off += rounding_of(exact.mT, made[-1].mT, *roots) if turned else rounding_of(exact, made[-1], *roots)
    return made[0] if len(made) == 1 else torch.cat(made, dim=2 if turned else 1), off.sqrt()
