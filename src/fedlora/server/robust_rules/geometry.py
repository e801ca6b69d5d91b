"""The clients' changes relative to each other: all that a rule may use. No coordinates, no ranks, no sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlora.server.changes import Changes

# When norms or scores count as equal. Coordinates of condition 1e6 move them by up to 1e-7.
ALIKE = 1e-6
_SQUARES = 1e-13  # the float64 rounding of a squared distance, relative to the squared norms
_FARTHEST = 1e140  # medians: the square of a larger one overflows


@dataclass(frozen=True, eq=False)
class Geometry:
    """Points X_i, known by their inner products. float64.

    gram (n, n): <X_i, X_j>, in units of `unit`^2. noise (n,): a distance of X_i below it is rounding, in units of
    `unit`. unit: the median of the non-zero norms.

    Example:
        >>> gram = torch.eye(2, dtype=torch.float64)
        >>> Geometry(gram, noise=torch.zeros(2, dtype=torch.float64), unit=1.0).squares().tolist()
        [[0.0, 2.0], [2.0, 0.0]]
    """

    gram: Tensor
    noise: Tensor
    unit: float

    @property
    def norms(self) -> Tensor:
        """(n,): ||X_i||, in units of `unit`."""
        return self.gram.diagonal().clamp(min=0).sqrt()

    def squares(self) -> Tensor:
        """(n, n): ||X_i - X_j||^2; exactly zero if the points are equal up to rounding."""
        own = self.gram.diagonal()
        apart = own[:, None] + own - 2 * self.gram
        rounding = 4 * (self.noise[:, None] + self.noise).square() + _SQUARES * (own[:, None] + own)
        return torch.where(apart > rounding, apart, 0.0).fill_diagonal_(0.0)

    def from_point(self, c: Tensor) -> Tensor:
        """(n,): ||X_i - z|| for z = sum_j c_j X_j."""
        own, along = self.gram.diagonal(), self.gram @ c
        return (own - 2 * along + c @ along).clamp(min=0).sqrt()

    def size(self, a: Tensor) -> float:
        """||sum_i a_i X_i||."""
        return float((a @ self.gram @ a).clamp(min=0).sqrt())

    def mixed(self, W: Tensor) -> Geometry:
        """The geometry of the points sum_j W_ij X_j."""
        return Geometry(W @ self.gram @ W.mT, W.abs() @ self.noise, self.unit)


def geometry_of(changes: Changes) -> tuple[Geometry, Tensor]:
    """The clients' changes, and the share of each that it includes (n,): 1, except for changes beyond float64's range.

    Example:
        >>> from fedlora.server.changes import Changes
        >>> one = torch.ones(1, dtype=torch.float64)
        >>> geometry_of(Changes(norms=3 * one, cosines=one[None], noise=0 * one))[0].unit
        3.0
    """
    norms = changes.norms
    some = norms[norms > 0]
    unit = float(some.median()) if len(some) else 1.0  # torch takes the lower of two: one liar alone cannot raise it
    relative = norms / unit
    kept = torch.where(relative > _FARTHEST, _FARTHEST / relative.clamp(min=_FARTHEST), 1.0)
    relative = torch.nan_to_num(relative, posinf=_FARTHEST).clamp(max=_FARTHEST)
    gram = relative[:, None] * changes.cosines * relative
    noise = torch.nan_to_num(changes.noise / unit, posinf=_FARTHEST).clamp(max=_FARTHEST)
    return Geometry(gram, noise, unit), kept


def in_order(values: Sequence[float]) -> list[int]:
    """The indices of `values`, smallest first; of equal values, the first index first."""
    places = sorted(range(len(values)), key=lambda k: (values[k], k))
    found: list[int] = []
    alike: list[int] = []
    for k in places:
        if alike and values[k] > values[alike[0]] + ALIKE * abs(values[alike[0]]):
            found, alike = found + sorted(alike), []
        alike.append(k)
    return found + sorted(alike)


__all__ = ["ALIKE", "Geometry", "geometry_of", "in_order"]
