"""Rules that bound how far one client can pull: norm clipping and centred clipping. They never leave anyone out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedlora.errors import HyperparameterError
from fedlora.server.robust_rules.geometry import ALIKE, Geometry
from fedlora.server.robust_rules.rule import Liars, Rule, Weighed, bound_of, number_of, require_bound, require_liars

Bound = float | Literal["median"]


@dataclass(frozen=True)
class Clip(Rule):
    """Cuts each change to a norm: m_i = min(1, threshold / ||X_i||).

    Source: Sun, Kairouz, Suresh, McMahan, "Can You Really Backdoor Federated Learning?" (arXiv 1911.07963), section 5.

    Args:
        threshold: a norm, in the units of the adapters; or "median", the lower median of the round's norms.
        liars: None, or how many the rule must tolerate, so that rounds with too few clients are refused.

    Example:
        >>> Clip(threshold=0.5).said
        'clip (threshold = 0.5)'
    """

    name: ClassVar[str] = "clip"

    threshold: Bound = "median"
    liars: Liars | None = None

    def __post_init__(self) -> None:
        require_bound(self.name, "threshold", self.threshold)
        if self.liars is not None:
            require_liars(self.name, self.liars)

    def least(self, clients: int) -> int:
        return 2 * number_of(self.liars or 0, clients) + 1

    def liars_hold(self, p: Sequence[float]) -> float:
        """A configured norm tolerates any number; half of the clients determine the median of the round's norms."""
        return super().liars_hold(p) if isinstance(self.threshold, str) else 0.0

    def weigh(self, geometry: Geometry, p: Tensor) -> Weighed:
        norms = geometry.norms
        most = bound_of(self.threshold, norms, geometry.unit)
        kept, why = _cut(norms, most, geometry.unit, "its change has norm")
        return Weighed(p * kept, {"threshold": most * geometry.unit}, why)


@dataclass(frozen=True)
class CentredClipping(Rule):
    """From a centre v, which begins at no change: v <- v + sum_i p_i (X_i - v) min(1, tau / ||X_i - v||), repeated.

    Source: Karimireddy, He, Jaggi, "Learning from History for Byzantine Robust Optimization" (ICML 2021), whose centre
    is the last round's. Here it is what the server sent, so that liars in one round cannot affect the next.

    Args:
        tau: how far one client can pull in one iteration; or "median", of the round's norms.
        iterations: with one, this is `Clip`.
        liars: as in `Clip`.

    Example:
        >>> CentredClipping(tau=0.5, iterations=2).said
        'centred-clipping (tau = 0.5, iterations = 2)'
    """

    name: ClassVar[str] = "centred-clipping"

    tau: Bound = "median"
    iterations: int = 3
    liars: Liars | None = None

    def __post_init__(self) -> None:
        require_bound(self.name, "tau", self.tau)
        if not isinstance(self.iterations, int) or isinstance(self.iterations, bool) or self.iterations < 1:
            raise HyperparameterError(f"{self.name}: iterations is a whole number >= 1; got {self.iterations!r}.")
        if self.liars is not None:
            require_liars(self.name, self.liars)

    def least(self, clients: int) -> int:
        return 2 * number_of(self.liars or 0, clients) + 1

    def liars_hold(self, p: Sequence[float]) -> float:
        """A configured norm tolerates any number; half of the clients determine the median of the round's norms."""
        return super().liars_hold(p) if isinstance(self.tau, str) else 0.0

    def weigh(self, geometry: Geometry, p: Tensor) -> Weighed:
        most = bound_of(self.tau, geometry.norms, geometry.unit)
        c, moved = torch.zeros_like(p), 0.0
        why: dict[int, str] = {}
        for k in range(self.iterations):
            apart = geometry.from_point(c) if k else geometry.norms
            kept, why = _cut(apart, most, geometry.unit, "its distance from the centre is")
            step = p * kept - (p * kept).sum() * c
            moved, c = geometry.size(step), c + step
        facts = {"tau": most * geometry.unit, "iterations": float(self.iterations), "last_step": moved * geometry.unit}
        return Weighed(c, facts, why)


def _cut(sizes: Tensor, most: float, unit: float, what: str) -> tuple[Tensor, dict[int, str]]:
    """min(1, most / size) for each, and the reason for each below 1."""
    over = sizes > most * (1 + ALIKE)
    kept = torch.where(over, most / torch.where(over, sizes, 1.0), 1.0)
    why = {
        k: f"{what} {float(sizes[k]) * unit:.4g}, and the bound is {most * unit:.4g}"
        for k in over.nonzero()[:, 0].tolist()
    }
    return kept, why


__all__ = ["CentredClipping", "Clip"]
