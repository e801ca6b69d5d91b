"""All that the server remembers of a federation, in its checkpoints; what a changed policy makes it forget; and how a
checkpoint says whose it is."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TypeVar

from fedlora.core import checkpoint
from fedlora.core.lora import named_tensors
from fedlora.core.read_only import ReadOnly
from fedlora.flower.messages.envelope import Receipt
from fedlora.flower.rounds.events import PolicyChanged
from fedlora.server.server import Server
from fedlora.server.state import RunState, ServerState

log = logging.getLogger(__name__)
T = TypeVar("T")
Members = Mapping[str, int | Mapping[str, int]]


@dataclass(frozen=True)
class Unusable:
    """What became of a client in the attempts at a round that did not count. times: those in which it was to be asked
    and gave nothing usable. fate, why: in the last of them."""

    times: int
    fate: str
    why: str


@dataclass(frozen=True, eq=False)
class FlowerState:
    """A run's state, and what the server knows of the clients.

    examples: client -> the number of training examples that it reported with its last accepted upload. receipts: for
    the clients' work (absent: never asked). unusable: for clients that gave nothing usable in an attempt at the next
    round. members: the clients of the policy as it was last read, with their ranks.
    """

    run: str
    state: RunState
    examples: Mapping[str, float] = field(default_factory=dict)
    receipts: Mapping[str, Receipt] = field(default_factory=dict)
    members: Members = field(default_factory=dict)
    unusable: Mapping[str, Unusable] = field(default_factory=dict)

    @property
    def next_round(self) -> int:
        """The round that is played from this state."""
        return self.state.round + 1

    def under(self, clients: Members, why: str = "") -> tuple[FlowerState, PolicyChanged | None]:
        """The state under a policy with these clients, and what is new in it since the last reading; None: nothing.

        The server forgets a client that was removed, except for the receipt, by which its site finds its own work
        again. A client that was removed and came back between two readings of the policy was never removed. why: as in
        `PolicyChanged`.
        """
        old = self.members
        added = {name: rank for name, rank in clients.items() if name not in old}
        gone = tuple(name for name in old if name not in clients)
        other = {name: (old[name], rank) for name, rank in clients.items() if old.get(name, rank) != rank}

        def left(table: Mapping[str, T]) -> Mapping[str, T]:
            return ReadOnly({name: value for name, value in table.items() if name not in gone})

        state = replace(self.state, clients=left(self.state.clients))
        after = replace(
            self, state=state, unusable=left(self.unusable), examples=left(self.examples), members=ReadOnly(clients)
        )
        changed = added or gone or other or why
        return after, PolicyChanged(self.next_round, added, gone, other, why) if changed else None


def newest(
    folder: Path, run: str, server: Server, state: ServerState, tell: Callable[[str], None] = log.warning
) -> FlowerState | None:
    """The newest sound checkpoint of a run; None: there is none. state: any of the run's, for its names and shapes.
    tell: receives a line for each damaged one.

    Raises:
        CheckpointError: there are some, but they are another run's, or damaged.
    """
    kind, of = server.method.State, run_identity(run, server, state)
    found = checkpoint.load_newest(folder, FlowerState, kind, of=of, tell=tell)
    return None if found is None else found[1]


def run_identity(run: str, server: Server, state: ServerState) -> str:
    """The run's name in its checkpoints: its own, the method with its options, and a digest of all names and shapes."""
    method = server.method
    options: dict[str, object] = (
        {f.name: getattr(method, f.name) for f in fields(method)} if is_dataclass(method) else {}
    )
    said = ", ".join(f"{name}={value}" for name, value in options.items() if isinstance(value, str | int | float))
    shapes = [(name, tuple(tensor.shape)) for name, tensor in named_tensors(replace(state.start, heads=state.heads))]
    return f"{run}, {method.name}({said}), modules {hashlib.sha256(repr(sorted(shapes)).encode()).hexdigest()[:8]}"
