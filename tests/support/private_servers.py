"""Private servers for tests: nothing on disk, no ledger, noise only where a test asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedlora import Server, build
from fedlora.methods import METHODS
from fedlora.privacy import Mechanism
from fedlora.server.private import Private, Releases
from fedlora.server.server import Heads

FINE = 2.0**-35  # a grid on which rounding is nothing beside float64 oracles of 1e-9


@dataclass(frozen=True)
class OnAGrid(Private):
    """Sums on this grid, whatever the noise."""

    grid: float = FINE

    def mechanism(self, size: int) -> Mechanism:
        return Mechanism(self.clipping_norm, self.noise_multiplier, self.grid)


# Those whose result is a function of one sum.
SUMMED = sorted(
    name
    for name in METHODS
    if (m := build(name)).linear_in != "clients" and not (m.one_rank and m.linear_in == "products")
)


class InMemory(Releases):
    """Keeps noised sums of rounds, and remembers what was asked of it."""

    def __init__(self) -> None:
        self.kept: dict[int, Tensor] = {}
        self.settled: list[int] = []
        self.contexts: dict[int, str] = {}
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


def private(name: str = "glora", *, grid: float | None = FINE, heads: Heads | None = None, **options: Any) -> Server:
    """A server of that method without noise or clip to speak of, but for what `options` of `Private` say. grid: of
    `OnAGrid`; None: as the mechanism chooses."""
    settings = {
        "clipping_norm": 64.0, "noise_multiplier": 0.0, "clients": ("a", "b", "c", "d"), "rank": 64,
        "releases": InMemory(), **options,
    }  # fmt: skip
    made = Private(**settings) if grid is None else OnAGrid(**settings, grid=grid)
    return Server(build(name), heads, round=made)
