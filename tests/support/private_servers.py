"""Private servers for tests: nothing on disk, no ledger, noise only where a test asks for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fedlora import Server, build
from fedlora.core.accumulating import Accumulating
from fedlora.methods import METHODS
from fedlora.privacy import Geometry, Mechanism, poisson_sample
from fedlora.server.private_options import Privacy, Releases

ACCUMULATING = sorted(name for name, method in METHODS.items() if issubclass(method, Accumulating))
FINE = 2.0**-35  # a grid on which rounding is nothing beside float64 oracles of 1e-9


class InMemory(Releases):
    """Keeps noised sums of rounds, and remembers what was asked of it."""

    def __init__(self) -> None:
        self.kept: dict[int, Tensor] = {}
        self.settled: list[int] = []
        self.contexts: dict[int, str] = {}

    def stored(self, round: int, context: str) -> Tensor | None:
        if round in self.kept and self.contexts[round] != context:
            raise AssertionError("another context")
        return self.kept.get(round)

    def settle(self, round: int, context: str, noised: Tensor, mechanism: Mechanism) -> Tensor:
        self.settled.append(round)
        self.kept[round], self.contexts[round] = noised, context
        return noised

    def sampled(self, round: int, context: str, clients: Sequence[str], share: float) -> list[str]:
        return poisson_sample(clients, share)


def private(name: str = "glora", *, server: Mapping[str, Any] | None = None, **options: Any) -> Server:
    """A server of that method without noise or clip to speak of, but for what `options` of `Privacy` say."""
    settings = {
        "clip": 64.0, "noise_multiplier": 0.0, "geometry": Geometry(), "clients": 4, "rank": 64,
        "releases": InMemory(), "grid": FINE, **options,
    }  # fmt: skip
    weighting = "uniform" if settings.get("most_examples") is None else "examples"
    return Server(
        build(name), **{"missing": "zero", "weighting": weighting, "privacy": Privacy(**settings), **(server or {})}
    )
