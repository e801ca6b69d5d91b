"""The geometric median: the point with the smallest weighted sum of distances to all changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedlora.errors import HyperparameterError
from fedlora.server.robust_rules.geometry import Geometry
from fedlora.server.robust_rules.rule import Liars, Rule, Weighed, number_of, require_liars

_TIE = 1e-9  # the relative difference of two equal objectives
_FAR = 1e8  # times the norm that half of the weight stays below: beyond it, only a change's direction counts
_CLOSE = 1e-6  # times the median distance: this close, the point itself may be the median


@dataclass(frozen=True)
class GeometricMedian(Rule):
    """argmin_z sum_i p_i ||X_i - z||; clients that hold less than half of the *weight* cannot move it far.

    Source: Pillutla, Kakade, Harchaoui, "Robust Aggregation for Federated Learning" (IEEE TSP 2022). It starts at the
    best of the points and leaves it by the step of Vardi and Zhang (PNAS 2000); then it takes Newton steps, or
    Weiszfeld's if these do not descend. Nothing is smoothed. A change beyond 1e8 times the norm that half of the weight
    stays below is first shortened to that: its direction stays the same to 1e-8, and with longer ones float64 would
    have no digit left for the others.

    Args:
        tolerance: the largest slope of the objective at which the iteration stops, relative to 1. `left` in the facts
            is the final slope.
        iterations: the most.
        liars: None, or how many the rule must tolerate, so that rounds with too few clients are refused.

    Example:
        >>> GeometricMedian().least(10)
        1
    """

    name: ClassVar[str] = "geometric-median"

    tolerance: float = 1e-10
    iterations: int = 1000
    liars: Liars | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.tolerance, float) or not 0 < self.tolerance < 1:
            raise HyperparameterError(f"{self.name}: tolerance is a slope in (0, 1); got {self.tolerance!r}.")
        if not isinstance(self.iterations, int) or isinstance(self.iterations, bool) or self.iterations < 1:
            raise HyperparameterError(f"{self.name}: iterations is a whole number >= 1; got {self.iterations!r}.")
        if self.liars is not None:
            require_liars(self.name, self.liars)

    def least(self, clients: int) -> int:
        return 2 * number_of(self.liars or 0, clients) + 1

    def liars_hold(self, p: Sequence[float]) -> float:
        """It counts weights: the largest ones, for as many clients as may lie."""
        return min(1.0, sum(sorted(p)[len(p) - self.declared(len(p)) :]))

    def weigh(self, geometry: Geometry, p: Tensor) -> Weighed:
        p = p / p.sum()
        k = _shortening(geometry.norms, p)
        made = self._median(Geometry(k[:, None] * geometry.gram * k, k * geometry.noise, geometry.unit), p)
        return Weighed(made.coefficients * k, made.facts, made.why)

    def _median(self, geometry: Geometry, p: Tensor) -> Weighed:
        apart = geometry.squares().sqrt()
        sums = apart @ p
        best = int(sums.argmin())
        slope, c = _from(best, apart, geometry, p)
        if slope == 0.0:  # a point is the median; if others are as good, so is everything between them
            good = [k for k in range(len(p)) if float(sums[k]) <= float(sums[best]) * (1 + _TIE)]
            held = (apart[good] == 0).any(dim=0) if _from_all(good, apart, geometry, p) else apart[best] == 0
            return _at(held, 0, geometry, p)
        left, steps = slope, 0
        for k in range(self.iterations):
            steps = k + 1
            apart_now = geometry.from_point(c).clamp(min=1e-150)
            closest = int(apart_now.argmin())
            if apart_now[closest] < _CLOSE * apart_now.median() and _from(closest, apart, geometry, p)[0] == 0.0:
                return _at(apart[closest] == 0, steps, geometry, p)  # rounding made sums equal, and `best` was not it
            pulls = p / apart_now
            after = pulls / pulls.sum()
            left = float(pulls.sum()) * geometry.size(after - c)
            if left <= self.tolerance:
                c = after
                break
            faster = _newton(c, apart_now, pulls, geometry)
            nearer = faster is not None and float(p @ geometry.from_point(faster)) < float(p @ apart_now)
            c = faster if faster is not None and nearer else after
        else:
            pulls = p / geometry.from_point(c).clamp(min=1e-150)
            c = pulls / pulls.sum()  # again a mean of the points, which a Newton step need not be
        return Weighed(c, {"iterations": float(steps), "left": left})


def _shortening(norms: Tensor, p: Tensor) -> Tensor:
    """The factor that shortens each change to at most `_FAR`; 1 for most."""
    order = norms.argsort()
    half = norms[order[int((p[order].cumsum(0) < 0.5).sum())]]
    if half == 0:  # no change is the median, so any length will do
        half = norms[norms > 0].min() if bool((norms > 0).any()) else norms.new_ones(())
    most = _FAR * half
    return torch.where(norms > most, most / norms.clamp(min=most), 1.0)


def _at(held: Tensor, steps: int, geometry: Geometry, p: Tensor) -> Weighed:
    """The result if these points are the median."""
    c = torch.where(held, p, 0.0)
    return Weighed(c / c.sum(), {"iterations": float(steps), "left": 0.0}, _elsewhere(c, geometry))


def _newton(c: Tensor, apart: Tensor, pulls: Tensor, geometry: Geometry) -> Tensor | None:
    """A Newton step from z = sum_j c_j X_j, as coefficients; None if there is none.

    The Hessian is W I - sum_j w_j u_j u_j^T for the directions u_j from z to the points, w_j = p_j / ||X_j - z||, with
    W their sum: a step in the points' span solves a system of n unknowns.
    """
    along = geometry.gram @ c
    inner = geometry.gram - along[:, None] - along + c @ along  # of X_i - z
    roots = pulls.sqrt()
    M = pulls.sum() * torch.eye(len(c), dtype=c.dtype) - (roots / apart)[:, None] * inner * (roots / apart)
    try:
        b = torch.linalg.solve(M, roots * apart)
    except RuntimeError:  # all points lie on one line through z
        return None
    a = roots / apart * b
    step = (1 - a.sum()) * c + a
    return step if bool(torch.isfinite(step).all()) else None


def _from(k: int, apart: Tensor, geometry: Geometry, p: Tensor) -> tuple[float, Tensor]:
    """How steeply the objective falls from point k (0 if k is the median), and where a step from there leads."""
    here = apart[k] == 0
    held = float(p[here].sum())
    pulls = torch.where(here, 0.0, p / torch.where(here, 1.0, apart[k]))
    total = float(pulls.sum())
    at = torch.zeros_like(p)
    at[k] = 1.0
    pull = geometry.size(pulls - total * at)
    if pull <= held * (1 + _TIE):
        return 0.0, at
    stay = held / pull
    return pull - held, (1 - stay) * pulls / total + stay * torch.where(here, p, 0.0) / held


def _from_all(points: list[int], apart: Tensor, geometry: Geometry, p: Tensor) -> bool:
    return all(_from(k, apart, geometry, p)[0] == 0.0 for k in points)


def _elsewhere(c: Tensor, geometry: Geometry) -> dict[int, str]:
    """Why clients do not count if one point is the median."""
    far = geometry.from_point(c / c.sum())
    return {
        k: f"the median is another client's change, {float(far[k]) * geometry.unit:.4g} away"
        for k in (c == 0).nonzero()[:, 0].tolist()
    }


__all__ = ["GeometricMedian"]
