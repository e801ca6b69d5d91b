"""All that the server remembers of a federation, in its checkpoints; what a changed policy makes it forget; and how a
checkpoint says whose it is."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import ClassVar

from fedlora.core.lora import named_tensors
from fedlora.core.read_only import ReadOnly
from fedlora.flower.messages.envelope import Receipt
from fedlora.flower.rounds.events import PolicyChanged
from fedlora.server.server import Server
from fedlora.server.state import RunState, ServerState


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


def run_identity(run: str, server: Server, state: ServerState) -> str:
    """The run's name in its checkpoints: its own, the method with its options, and a digest of all names and shapes."""
    method = server.method
    options: dict[str, object] = (
        {f.name: getattr(method, f.name) for f in fields(method)} if is_dataclass(method) else {}
    )
    said = ", ".join(f"{name}={value}" for name, value in options.items() if isinstance(value, str | int | float))
    shapes = [(name, tuple(tensor.shape)) for name, tensor in named_tensors(replace(state.start, heads=state.heads))]
    return f"{run}, {method.name}({said}), modules {hashlib.sha256(repr(sorted(shapes)).encode()).hexdigest()[:8]}"


__all__ = ["FlowerState", "run_identity"]
