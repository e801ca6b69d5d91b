"""An update in energy order: its SVD with every component, stored as the balanced pair that clients get."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from fedlora.linalg.basics import U64, unit_roundoff
from fedlora.linalg.factored import Factored, panels

# The share of an update's energy that readouts may leave out as rounding. A larger share is kept and reported.
MOST_ROUNDING = 1e-3


@dataclass(frozen=True, eq=False)
class Spectrum:
    """An update Delta W = U diag(s) Vh = B A, s (l,) > 0 descending; U and Vh orthonormal.

    Stored as B = U sqrt(s) (d_out, l) and A = sqrt(s) Vh (l, d_in): a readout is a choice of columns and rows, and
    rounds nothing. Stored as U, s, Vh each readout would round every number once more.

    sound: how many leading components exceed the rounding of the stored factors. Readouts use only these, because the
    others point elsewhere in every gauge; the update keeps them all. rounding: the share of the energy in components
    that rounding could have made, including those that count as sound because there is too much to leave out. cut: the
    share of the energy that `head` left out: ||Delta W - what is here||^2 / ||Delta W||^2.
    """

    B: Tensor
    s: Tensor
    A: Tensor
    sound: int
    rounding: float = 0.0
    cut: float = 0.0

    @property
    def rank(self) -> int:
        """l, the number of all components."""
        return self.s.shape[0]

    @property
    def U(self) -> Tensor:
        """(d_out, l), orthonormal columns."""
        return self.B / self.s.sqrt()

    @property
    def Vh(self) -> Tensor:
        """(l, d_in), orthonormal rows."""
        return self.A / self.s.sqrt()[:, None]

    def balanced(self, chosen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(B, A) of the chosen components (None: all), sqrt(s) on both."""
        return (self.B, self.A) if chosen is None else (self.B.index_select(1, chosen), self.A.index_select(0, chosen))

    def head(self, rank: int) -> Spectrum:
        """The `rank` strongest components: the best approximation of that rank (Eckart-Young)."""
        B, A = self.B[:, :rank].contiguous(), self.A[:rank]
        cut = self.cut + (1 - self.cut) * _share(self.s, rank)
        return Spectrum(B, self.s[:rank], A, min(self.sound, rank), self.rounding, cut)

    def rank_of_energy(self, share: float) -> int:
        """The least number of leading components whose squares make up `share` of all squares; 1: every component."""
        if share == 1.0 or self.rank == 0:
            return self.rank
        s = self.s.double() / self.s[0].double()  # squares of tiny numbers are zero
        left_out = s.square().flip(0).cumsum(0).flip(0)  # by a cut before each one; smallest summed first
        # 1 - 0.8 is a little less than 0.2
        return max(1, int((left_out > (1 - share) * (1 + 1e-9) * left_out[0]).sum()))


def _share(s: Tensor, rank: int) -> float:
    """The share of the squares of s (l,), descending, that comes after the first `rank`."""
    if rank >= len(s):
        return 0.0
    squares = (s.double() / s[0].double()).square()  # squares of tiny numbers are zero
    return float(squares[rank:].sum() / squares.sum())


class Part(NamedTuple):
    """out (m, c, d, r): c neighbours of n columns each of a tall matrix, times inner (m, c, n, r).

    All neighbours in one call: one by one, they take a third as long as the product with the whole matrix.
    """

    columns: slice
    inner: Tensor
    out: Tensor


def store(side: Factored, Y: Tensor, out: Tensor, parts: Sequence[Part] = ()) -> Tensor:
    """out (m, d, l) = Q Y in out's dtype. Returns the squared rounding error of each column (m, l), measured. parts:
    what else to store of the same tall matrix, which is read once."""
    inner, off = side.inner(Y), Y.new_zeros(len(Y), Y.shape[2])
    for some, rows in panels(side.tall):
        panel = side.tall[some, rows].double()
        # In the memory order of `out`: a transposing copy would cost as much as the product.
        exact = panel @ inner[some] if out.stride(2) == 1 else (inner[some].mT @ panel.mT).mT
        out[some, rows] = exact
        off[some] += exact.sub_(out[some, rows]).square_().sum(dim=1)
        for part in parts:
            neighbours = panel[:, :, part.columns].view(*panel.shape[:2], *part.inner.shape[1:3]).transpose(1, 2)
            part.out[some, :, rows] = neighbours @ part.inner[some]
    return off


def canonical_signs(U: Tensor) -> Tensor:
    """(m, l) signs that make the entry of largest magnitude of each column of U (m, d, l) positive."""
    m, d, l = U.shape
    at_once = math.gcd(d, 16)  # torch reduces long rows ten times as fast as short ones
    rows = U.reshape(m, d // at_once, at_once * l)
    highest, lowest = (x.reshape(m, at_once, l) for x in (rows.amax(dim=1), rows.amin(dim=1)))
    return torch.where(highest.amax(dim=1) >= -lowest.amin(dim=1), 1.0, -1.0)


class Counts(NamedTuple):
    """keep: how many components to store. sound, rounding: as in `Spectrum`. trimmed: the energy of those not kept."""

    keep: int
    sound: int
    rounding: float
    trimmed: float


def cut_by_rounding(s: Sequence[float], terms: float, floor: float, dtype: torch.dtype) -> Counts:
    """What rounding leaves of the singular values s, descending, about 1.

    Args:
        terms: the norm of the sizes of the summed terms. floor: the largest size of a direction that rounding of the
            stored factors can make. dtype: of the result.

    The dropped tail is smaller, all together, than the result's dtype or float64's own sum can resolve. Everything is
    dropped only if it is all rounding, as after exact cancellation.
    """
    tail = [*accumulate((x * x for x in reversed(s)), initial=0.0)][::-1]  # the energy from each one to the last
    total = tail[0]
    if total <= (64 * U64 * terms) ** 2:
        return Counts(0, 0, 0.0, total)
    invisible = max(0.25 * unit_roundoff(dtype) * total**0.5, 4 * U64 * terms)
    keep = _above(invisible**2, tail)
    loud = _above(max(floor, 64 * U64 * terms), s)  # rounding of the factors, or of the float64 sum itself
    sound = max(loud, _above(MOST_ROUNDING * total, tail))
    while 0 < sound < len(s) and s[sound] > s[sound - 1] * (1 - 1e-6):  # never between two equal components
        sound += 1
    return Counts(keep, min(keep, sound), tail[loud] / total, tail[keep])


def _above(least: float, falling: Sequence[float]) -> int:
    return bisect_left(falling, -least, key=lambda x: -x)
