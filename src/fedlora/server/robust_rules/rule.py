"""A robust rule: a pure function of the changes' positions relative to each other, and of the clients' weights."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from torch import Tensor

from fedlora.errors import HyperparameterError
from fedlora.server.robust_rules.geometry import Geometry

Liars = int | float  # the number of clients in a round, or the share of them (below 1), rounded up


@dataclass(frozen=True, eq=False)
class Weighed:
    """A rule's result for a round. coefficients (n,): c of the robust change sum_i c_i X_i, never negative.

    facts: the rule's findings by name. why: index -> why that client is left out or held back.

    Example:
        >>> Weighed(torch.tensor([1.0, 0.0], dtype=torch.float64), why={1: "far"}).why
        {1: 'far'}
    """

    coefficients: Tensor
    facts: Mapping[str, float] = field(default_factory=dict)
    why: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Rule(ABC):
    """A robust rule. Implementations are frozen dataclasses; their fields are their keys in `[defence]`.

    factor_averages: allow a method that averages factors, where the rule bounds nothing; otherwise that is refused.

    Example:
        >>> from fedlora.server.robust_rules import Krum
        >>> Krum(liars=1).too_few(4)
        'krum with 1 liar among 4 clients needs 5 of them'
    """

    name: ClassVar[str]

    factor_averages: bool = field(default=False, kw_only=True, repr=False)

    @abstractmethod
    def least(self, clients: int) -> int:
        """The fewest clients for a round of this many, because liars can be a share of them."""

    @abstractmethod
    def weigh(self, geometry: Geometry, p: Tensor) -> Weighed:
        """The coefficients of the robust change. p (n,): the clients' weights, which sum to 1."""

    def liars_hold(self, p: Sequence[float]) -> float:
        """The share that liars can hold of what this rule counts: from one half on they decide. This default counts
        clients. p: the clients' weights, or the most that each can have. Without `liars`, it assumes one.

        Example:
            >>> from fedlora.server.robust_rules import Clip, GeometricMedian
            >>> Clip(liars=1).liars_hold([0.5, 0.25, 0.25]), GeometricMedian().liars_hold([0.5, 0.25, 0.25])
            (0.3333333333333333, 0.5)
        """
        return min(1.0, self.declared(len(p)) / len(p))

    def declared(self, clients: int) -> int:
        """f, for this many clients; one if `liars` is not set."""
        return 1 if self._liars is None else number_of(self._liars, clients)

    def without(self, refused: int, p: Sequence[float]) -> Self:
        """The rule for clients with these weights, after `refused` more were refused for what they sent; each of those
        is one of the f. It tolerates as many of the f among the rest as it can, and at least f - `refused`. If more
        than f were refused, nobody knows how many remain: f stays.

        Example:
            >>> from fedlora.server.robust_rules import Krum
            >>> rules = [Krum(liars=1).without(1, [1 / n] * n) for n in (4, 5)]
            >>> [rule.liars for rule in rules], Krum(liars=1).without(2, [1 / 3] * 3).liars
            ([0, 1], 1)
        """
        if self._liars is None or not refused:
            return self
        f = self.declared(len(p) + refused)
        fewer = [self.bearing(k) for k in range(f, f - refused - 1, -1)] if refused <= f else []
        return next((rule for rule in fewer if rule.overcome(p) is None), self.bearing(f))

    def bearing(self, liars: int) -> Self:
        """The same rule for this many liars."""
        return replace(self, liars=liars)  # type: ignore[call-arg]

    @property
    def _liars(self) -> Liars | None:
        return getattr(self, "liars", None)

    @property
    def said(self) -> str:
        """The rule and its keys on one line."""
        keys = {name: value for name, value in vars(self).items() if value is not None and name != "factor_averages"}
        keys |= {"factor_averages": True} if self.factor_averages else {}
        shown = ", ".join(f"{name} = {value}" for name, value in keys.items())
        return f"{self.name} ({shown})" if shown else self.name

    def too_few(self, clients: int) -> str | None:
        """Why this number of clients is too few; None if it is enough."""
        needed = self.least(clients)
        if clients >= needed:
            return None
        f = number_of(self._liars or 0, clients)
        with_liars = f" with {f} liar{'s' * (f != 1)} among {clients} clients" if f else f" of {clients} clients"
        return f"{self.name}{with_liars} needs {needed} of them"

    def overcome(self, p: Sequence[float]) -> str | None:
        """Why clients with these weights are too few or too unequal; None if the rule tolerates its liars."""
        held, f = self.liars_hold(p), self.declared(len(p))
        if (few := self.too_few(len(p))) or held < 0.5 - 1e-9:
            return few
        unsaid = "; without `liars` the rule assumes one: set liars = 0 if nobody lies" * (self._liars is None)
        return (
            f"{self.name} tolerates liars of less than half, but {f} of {len(p)} clients can hold {held:.0%} (one "
            f"can have {max(p):.0%} of the weight{unsaid})"
        )


def number_of(liars: Liars, clients: int) -> int:
    """f, for this many clients."""
    return liars if isinstance(liars, int) else math.ceil(liars * clients - 1e-9)


def require_liars(rule: str, liars: object) -> None:
    """Raises `HyperparameterError` if this is not a number of liars."""
    whole = isinstance(liars, int) and not isinstance(liars, bool) and liars >= 0
    if not whole and not (isinstance(liars, float) and 0 <= liars < 0.5):
        raise HyperparameterError(
            f"{rule}: liars is a number of clients (2), or a share of a round's clients below one half (0.2); got "
            f"{liars!r}."
        )


def require_bound(rule: str, key: str, value: object) -> None:
    """Raises `HyperparameterError` if this is not a bound on norms."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
    if value != "median" and not number:
        raise HyperparameterError(
            f"{rule}: {key} is a positive number, or 'median' (of the round's norms); got {value!r}."
        )


def bound_of(bound: float | str, norms: Tensor, unit: float) -> float:
    """A bound in the geometry's units. "median": the lower median of the norms, one vote per client."""
    return float(norms.median()) if isinstance(bound, str) else bound / unit


__all__ = ["Liars", "Rule", "Weighed", "bound_of", "number_of", "require_bound", "require_liars"]
