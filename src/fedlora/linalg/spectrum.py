"""An update in energy order: its SVD with every component, and the level below which components may be rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from fedlora.errors import LostUpdate
from fedlora.linalg.basics import count_above, norm, unit_roundoff
from fedlora.linalg.shapes import Float, Tensor

_U64 = unit_roundoff(torch.float64)
# The share of an update's energy that readouts may leave out as rounding. A larger share is kept and reported.
MOST_ROUNDING = 1e-3


@dataclass(frozen=True, eq=False)
class Spectrum:
    """An update in energy order: Delta W = U diag(s) Vh. U (d_out, l) and Vh (l, d_in) orthonormal, s (l,) > 0.

    noise: components up to this size may be rounding of the stored factors. Their directions differ from gauge to
    gauge, so readouts leave them out; the update itself keeps them. rounding: the share of the energy in components
    that rounding could have made, including those that readouts keep because there is too much to leave out.
    """

    TAG: ClassVar[str] = "spectrum/1"

    U: Tensor
    s: Tensor
    Vh: Tensor
    noise: float = 0.0
    rounding: float = 0.0

    @property
    def rank(self) -> int:
        """l, the number of all components."""
        return self.s.shape[0]

    @cached_property
    def root(self) -> Tensor:
        """sqrt(s)."""
        return self.s.sqrt()

    @cached_property
    def sound(self) -> int:
        """The number of leading components larger than `noise`."""
        return count_above(self.s, self.noise)

    def head(self, rank: int) -> Spectrum:
        """The `rank` strongest components: the best approximation of that rank (Eckart-Young)."""
        return Spectrum(self.U[:, :rank], self.s[:rank], self.Vh[:rank], self.noise, self.rounding)

    def rank_of_energy(self, share: float) -> int:
        """The least number of leading components whose squares make up `share` of all squares; 1: every component.

        At least one if there is any.
        """
        if share == 1.0:
            return self.rank
        s = self.s.double() / (self.s[0] if self.rank and float(self.s[0]) else 1.0)  # squares of tiny numbers are zero
        left_out = s.square().flip(0).cumsum(0).flip(0)  # by a cut before each one; smallest summed first
        total = float(left_out[0]) if self.rank else 0.0
        kept = int((left_out > (1 - share) * (1 + 1e-9) * total).sum())  # 1 - 0.8 is a little less than 0.2
        return max(kept, 1) if self.rank and float(self.s[0]) else kept

    @property
    def balanced(self) -> tuple[Tensor, Tensor]:
        """The update as a pair (B, A) with sqrt(s) on both."""
        return self.U * self.root, self.Vh * self.root[:, None]


def with_canonical_signs(U: Tensor, s: Tensor, Vh: Tensor, noise: float = 0.0, rounding: float = 0.0) -> Spectrum:
    """U diag(s) Vh with canonical signs: the entry of largest magnitude of each u_j positive, v_j flipped with it.

    For one matrix, or several of one shape.
    """
    if s.shape[-1] == 0:
        return Spectrum(U, s, Vh, noise, rounding)
    sign = canonical_signs(U)
    # Our callers made both tensors, and nobody else holds them. Row-major, for readouts and files.
    return Spectrum(U.mul_(sign[..., None, :]).contiguous(), s, Vh.mul_(sign[..., None]).contiguous(), noise, rounding)


def canonical_signs(U: Tensor) -> Tensor:
    """The sign for each column (*, l) that makes its entry of largest magnitude positive."""
    return torch.where(U.amax(dim=-2) >= -U.amin(dim=-2), 1.0, -1.0).to(U)


def svd_of_matrix(X: Float[Tensor, "d_out d_in"], *, terms: float, stored: float, dtype: torch.dtype) -> Spectrum:
    """The SVD of a dense float64 sum. terms, stored: as for `cut_by_rounding`. dtype: of the result. The rounding of
    LAPACK's work on X counts like that of stored factors."""
    require_some(norm(X)[None], dtype)
    U, s, Vh = torch.linalg.svd(X, full_matrices=False)
    stored = max(stored, max(X.shape) ** 0.5 * _U64 * float(norm(s)))
    keep, noise, rounding = cut_by_rounding(s.tolist(), terms=terms, stored=stored, stored_in=dtype)
    return with_canonical_signs(U[:, :keep].to(dtype), s[:keep].to(dtype), Vh[:keep].to(dtype), noise, rounding)


def require_some(s: Float[Tensor, " l"], dtype: torch.dtype) -> None:
    """Raises `LostUpdate` if `dtype` would store nonzero singular values as zero."""
    if s.shape[0] and float(s[0]) > 0 and not bool(s.to(dtype).any()):
        raise LostUpdate(
            f"the mean update has norm {float(norm(s)):.1e}, which {dtype} stores as zero. Updates "
            f"that small usually come from a wrong unit: check the scaling of the uploads, or send float64."
        )


def cut_by_rounding(
    s: Sequence[float], *, terms: float, stored: float, stored_in: torch.dtype
) -> tuple[int, float, float]:
    """(how many of `s` to keep, `Spectrum.noise`, the share of the energy that may be rounding of the factors).

    Args:
        s: float64, descending. terms: the norm of the sizes of the summed terms. stored: the largest size of a
            direction that rounding of the stored factors can make. stored_in: the dtype of the result.

    The dropped part is smaller, all together, than the result's dtype or float64's own sum can resolve. Everything is
    dropped only if it is all rounding, as after exact cancellation.
    """
    unit = s[0] if len(s) else 0.0
    if unit == 0:
        return 0, 0.0, 0.0
    s, terms, stored = [x / unit for x in s], terms / unit, stored / unit  # squares of tiny numbers are zero
    total = math.fsum(x * x for x in s)
    if total <= (64 * _U64 * terms) ** 2:
        return 0, 0.0, 0.0
    invisible = max(0.25 * unit_roundoff(stored_in) * total**0.5, 4 * _U64 * terms) ** 2
    keep, first, doubtful, tail = len(s), len(s), 0.0, 0.0  # tail: the energy from one component to the last
    for k in range(len(s) - 1, -1, -1):
        tail += s[k] * s[k]
        if tail <= invisible:
            keep = k
        if s[k] <= stored:
            doubtful = tail
            if tail <= MOST_ROUNDING * total:
                first = k
    while 0 < first < len(s) and s[first] > s[first - 1] * (1 - 1e-6):  # never cut between two equal components
        first += 1
    noise = s[first] if first < len(s) else 0.0
    return keep, max(noise, min(64 * _U64 * terms, 0.5)) * unit, min(doubtful / total, 1.0)
