"""Krum and multi-Krum: keep the change, or the changes, nearest to their neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedlora.server.robust_rules.geometry import Geometry, in_order
from fedlora.server.robust_rules.rule import Liars, Rule, Weighed, number_of, require_liars


@dataclass(frozen=True)
class Krum(Rule):
    """The one change with the smallest sum of squared distances to its n - f nearest (itself included).

    Source: Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine Learning with Adversaries" (NeurIPS 2017), which leaves
    out one more neighbour; n - f as in Farhadkhani et al., "Byzantine Machine Learning Made Easy by Resilient Averaging
    of Momentums" (ICML 2022). Weights p_i are not used. Of equal clients it takes the first by id.

    Args:
        liars: f, how many it must tolerate; it needs n >= 2 f + 3.

    Example:
        >>> Krum(liars=0.2).least(10)
        7
    """

    name: ClassVar[str] = "krum"

    liars: Liars

    def __post_init__(self) -> None:
        require_liars(self.name, self.liars)

    def least(self, clients: int) -> int:
        return 2 * number_of(self.liars, clients) + 3

    def weigh(self, geometry: Geometry, p: Tensor) -> Weighed:
        return _nearest(geometry, torch.ones_like(p), number_of(self.liars, len(p)), 1)


@dataclass(frozen=True)
class MultiKrum(Rule):
    """The weighted mean of the n - f changes with the smallest scores of `Krum`.

    Source: as `Krum`.

    Example:
        >>> MultiKrum(liars=2).said
        'multi-krum (liars = 2)'
    """

    name: ClassVar[str] = "multi-krum"

    liars: Liars

    def __post_init__(self) -> None:
        require_liars(self.name, self.liars)

    def least(self, clients: int) -> int:
        return 2 * number_of(self.liars, clients) + 3

    def weigh(self, geometry: Geometry, p: Tensor) -> Weighed:
        f = number_of(self.liars, len(p))
        return _nearest(geometry, p, f, len(p) - f)


def _nearest(geometry: Geometry, p: Tensor, f: int, count: int) -> Weighed:
    """The mean, weighted by p, of the `count` changes with the smallest scores."""
    n = len(p)
    squares = geometry.squares()
    others = squares.fill_diagonal_(float("inf")).sort(dim=1).values[:, : max(1, n - f - 1)]
    scores = others.sum(dim=1).tolist() if n > 1 else [0.0]
    order = in_order(scores)
    chosen = order[:count]
    c = torch.zeros_like(p)
    c[chosen] = p[chosen]
    worst = scores[chosen[-1]] ** 0.5 * geometry.unit
    kept = "that of the client that was kept is" if count == 1 else f"the {count} clients that were kept have at most"
    why = {
        k: f"the distance to its {n - f} nearest is {scores[k] ** 0.5 * geometry.unit:.4g}; {kept} {worst:.4g}"
        for k in order[count:]
    }
    return Weighed(c / c.sum(), {"liars": float(f), "score": worst}, why)


__all__ = ["Krum", "MultiKrum"]
