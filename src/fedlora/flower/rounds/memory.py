"""All that the server remembers of a federation, in its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from fedlora.server.state import RunState


@dataclass(frozen=True, eq=False)
class FlowerState:
    """A run's state; how often each client's uploads were refused since one was taken; and how many examples each said
    that it trains on, with the last upload that was taken."""

    TAG: ClassVar[str] = "flower/1"

    run: str
    state: RunState
    refusals: Mapping[str, int] = field(default_factory=dict)
    examples: Mapping[str, float] = field(default_factory=dict)


__all__ = ["FlowerState"]
