"""All that the server remembers of a federation, in its checkpoints; and what a changed policy makes it forget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from fedlora.core.read_only import ReadOnly
from fedlora.flower.messages.envelope import Receipt
from fedlora.flower.rounds.events import PolicyChanged
from fedlora.server.state import RunState


@dataclass(frozen=True, eq=False)
class FlowerState:
    """A run's state; the number of each client's refused uploads since the last accepted one; the number of training
    examples that each reported with its last accepted upload; and the receipts for their work (absent: never
    asked)."""

    TAG: ClassVar[str] = "flower/2"

    run: str
    state: RunState
    refusals: Mapping[str, int] = field(default_factory=dict)
    examples: Mapping[str, float] = field(default_factory=dict)
    receipts: Mapping[str, Receipt] = field(default_factory=dict)

    def after(self, change: PolicyChanged) -> FlowerState:
        """The state after a policy change: a client that was removed, or has another rank, starts afresh."""
        gone = {*change.removed, *change.changed}
        clients = {
            name: replace(memory, ranks=None) if name in gone else memory for name, memory in self.state.clients.items()
        }
        refusals = {name: count for name, count in self.refusals.items() if name not in change.removed}
        examples = {name: count for name, count in self.examples.items() if name not in change.removed}
        state = replace(self.state, clients=ReadOnly(clients))
        return replace(self, state=state, refusals=ReadOnly(refusals), examples=ReadOnly(examples))


__all__ = ["FlowerState"]
