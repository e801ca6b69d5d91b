"""Nearest-neighbour mixing: before a rule looks, each change becomes the mean of its n - f nearest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from fedlora.errors import HyperparameterError
from fedlora.server.robust_rules.geometry import Geometry, in_order
from fedlora.server.robust_rules.rule import Liars, Rule, Weighed, number_of, require_liars


@dataclass(frozen=True)
class Mixing(Rule):
    """Y_i = the mean, weighted by p, of X_i and its n - f - 1 nearest; then `rule` runs on the Y_i. The result is again
    a sum of the X_i. With f = 0 every Y_i is the mean.

    Source: Allouah, Farhadkhani, Guerraoui, Gupta, Pinot, Stephan, "Fixing by Mixing" (AISTATS 2023).

    Example:
        >>> from fedlora.server.robust_rules import Krum
        >>> Mixing(Krum(liars=1), liars=1).said
        'mixing (liars = 1), then krum (liars = 1)'
    """

    name: ClassVar[str] = "mixing"

    rule: Rule
    liars: Liars

    def __post_init__(self) -> None:
        require_liars(self.name, self.liars)
        if not isinstance(self.rule, Rule) or isinstance(self.rule, Mixing):
            raise HyperparameterError(f"mixing comes before one of the other rules; got {self.rule!r}.")

    @property
    def said(self) -> str:
        return f"mixing (liars = {self.liars}), then {self.rule.said}"

    def least(self, clients: int) -> int:
        return max(2 * number_of(self.liars, clients) + 1, self.rule.least(clients))

    def liars_hold(self, p: Sequence[float]) -> float:
        """The larger of its own and its rule's share: mixing counts clients, and passes on each one's weight."""
        return max(super().liars_hold(p), self._inner(self.declared(len(p))).liars_hold(p))

    def bearing(self, liars: int) -> Self:
        return replace(self, rule=self._inner(liars), liars=liars)

    def _inner(self, liars: int) -> Rule:
        """The inner rule for that many liars, if it has such a setting."""
        return self.rule.bearing(liars) if hasattr(self.rule, "liars") else self.rule

    def too_few(self, clients: int) -> str | None:
        return self.rule.too_few(clients) or super().too_few(clients)

    def weigh(self, geometry: Geometry, p: Tensor) -> Weighed:
        n = len(p)
        count = max(1, n - number_of(self.liars, n))
        squares = geometry.squares().fill_diagonal_(-1.0)  # it is its own nearest, before its twins
        W = torch.zeros(n, n, dtype=p.dtype)
        for i, row in enumerate(squares.tolist()):
            near = in_order(row)[:count]
            W[i, near] = p[near] / p[near].sum()
        found = self.rule.weigh(geometry.mixed(W), p)
        c = W.mT @ found.coefficients
        lonely = dict.fromkeys((c == 0).nonzero()[:, 0].tolist(), "it is among the nearest of no client that counts")
        return Weighed(c, {**found.facts, "neighbours": float(count)}, lonely)


__all__ = ["Mixing"]
