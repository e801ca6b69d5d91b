"""Private servers for tests: nothing on disk, no ledger, noise only where a test asks for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedlora import Server, build
from fedlora.core.accumulating import Accumulating
from fedlora.methods import METHODS
from fedlora.privacy import Geometry, Mechanism
from fedlora.server.private_options import Privacy, Releases

FINE = 2.0**-35  # a grid on which rounding is nothing beside float64 oracles of 1e-9


@dataclass(frozen=True)
class OnAGrid(Privacy):
    """Sums on this grid, whatever the noise."""

    grid: float = FINE

    def mechanism(self, size: int) -> Mechanism:
        return Mechanism(self.clip, self.noise_multiplier, self.grid)


ACCUMULATING = sorted(name for name, method in METHODS.items() if issubclass(method, Accumulating))


class InMemory(Releases):
    """Keeps noised sums of rounds, and remembers what was asked of it. draws: who was drawn, whatever fell out."""

    def __init__(self, draws: Sequence[str] | None = None) -> None:
        self.draws = draws
        self.kept: dict[int, Tensor] = {}
        self.settled: list[int] = []
        self.contexts: dict[int, str] = {}
        self.drawn: dict[tuple[int, str], list[str]] = {}
        self.charged: list[float] = []

    def stored(self, round: int, context: str) -> Tensor | None:
        if round in self.kept and self.contexts[round] != context:
            raise AssertionError("another context")
        return self.kept.get(round)

    def settle(self, round: int, context: str, noised: Tensor, mechanism: Mechanism, sampling: float) -> Tensor:
        self.settled.append(round)
        self.charged.append(sampling)
        self.kept[round], self.contexts[round] = noised, context
        return noised

    def first_drawn(self, round: int, context: str, drawn: Sequence[str]) -> Sequence[str]:
        return self.drawn.setdefault((round, context), list(drawn if self.draws is None else self.draws))


def private(
    name: str = "glora", *, server: Mapping[str, Any] | None = None, grid: float | None = FINE, **options: Any
) -> Server:
    """A server of that method without noise or clip to speak of, but for what `options` of `Privacy` say. grid: of
    `OnAGrid`; None: as the mechanism chooses."""
    settings = {
        "clip": 64.0, "noise_multiplier": 0.0, "geometry": Geometry(), "clients": ("a", "b", "c", "d"), "rank": 64,
        "releases": InMemory(), **options,
    }  # fmt: skip
    made = Privacy(**settings) if grid is None else OnAGrid(**settings, grid=grid)
    weighting = "uniform" if settings.get("most_examples") is None else "examples"
    return Server(build(name), **{"missing": "zero", "weighting": weighting, "privacy": made, **(server or {})})
