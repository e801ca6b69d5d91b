"""All that the server remembers of a federation, in its checkpoints; what a changed policy makes it forget; and how a
checkpoint says whose it is."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import ClassVar

from fedlora.core import checkpoint
from fedlora.core.lora import named_tensors
from fedlora.core.read_only import ReadOnly
from fedlora.errors import ConfigError
from fedlora.flower.messages.envelope import Receipt
from fedlora.flower.rounds.events import PolicyChanged
from fedlora.server.server import Server
from fedlora.server.state import RunState, ServerState

log = logging.getLogger(__name__)
Members = Mapping[str, int | Mapping[str, int]]


@dataclass(frozen=True, eq=False)
class FlowerState:
    """A run's state; the number of each client's refused uploads since the last accepted one; the number of training
    examples that each reported with its last accepted upload; the receipts for their work (absent: never asked); and
    the policy's clients with their ranks (None: a checkpoint of an older fedlora, without them)."""

    TAG: ClassVar[str] = "flower/2"

    run: str
    state: RunState
    refusals: Mapping[str, int] = field(default_factory=dict)
    examples: Mapping[str, float] = field(default_factory=dict)
    receipts: Mapping[str, Receipt] = field(default_factory=dict)
    members: Members | None = None

    def under(self, clients: Members, why: str = "") -> tuple[FlowerState, PolicyChanged | None]:
        """The state under a policy with these clients, and what is new in it since the checkpoint; None: nothing.

        The server forgets a client that was removed, except for the receipt, by which it finds its own work again. If
        its rank changed, the server forgets only the ranks that pruning had left. A client that was removed and came
        back between two readings of the policy was never removed. why: as in `PolicyChanged`.
        """
        old = clients if self.members is None else self.members
        new, gone = [name for name in clients if name not in old], tuple(name for name in old if name not in clients)
        other = {name: (old[name], clients[name]) for name in clients if name in old and old[name] != clients[name]}
        known = {
            name: replace(memory, ranks=None) if name in other else memory
            for name, memory in self.state.clients.items()
            if name not in gone
        }
        state = replace(
            self,
            state=replace(self.state, clients=ReadOnly(known)),
            refusals=ReadOnly({name: count for name, count in self.refusals.items() if name not in gone}),
            examples=ReadOnly({name: count for name, count in self.examples.items() if name not in gone}),
            members=ReadOnly(clients),
        )
        if not (new or gone or other or why):
            return state, None
        return state, PolicyChanged(self.state.round + 1, {name: clients[name] for name in new}, gone, other, why)


def stored(folder: Path | None, of: str, kind: type, *, wanted: bool) -> FlowerState | None:
    """A run's newest sound checkpoint; None: there is none. of: as `run_identity`. kind: the class of the method's
    state.

    Raises:
        ConfigError: there is one, but it is not wanted; it is wanted, but there is no folder. CheckpointError: none of
            them can be used.
    """
    if folder is None:
        if wanted:
            raise ConfigError("resume=True needs the folder of the run's checkpoints: give folder=PATH too.")
        return None
    if wanted:
        found = checkpoint.load_newest(folder, FlowerState, kind, of=of, tell=log.warning)
        return None if found is None else found[1]
    if (newest := checkpoint.newest_round(folder)) is not None:
        raise ConfigError(
            f"{folder} has a checkpoint of round {newest}, and this run would begin again at round 1: its own would be "
            f"lost beside it. Continue with resume=True, or take another folder."
        )
    return None


def run_identity(run: str, server: Server, state: ServerState) -> str:
    """The run's name in its checkpoints: its own, the method with its options, and a digest of all names and shapes."""
    method = server.method
    options: dict[str, object] = (
        {f.name: getattr(method, f.name) for f in fields(method)} if is_dataclass(method) else {}
    )
    said = ", ".join(f"{name}={value}" for name, value in options.items() if isinstance(value, str | int | float))
    shapes = [(name, tuple(tensor.shape)) for name, tensor in named_tensors(replace(state.start, heads=state.heads))]
    return f"{run}, {method.name}({said}), modules {hashlib.sha256(repr(sorted(shapes)).encode()).hexdigest()[:8]}"


__all__ = ["FlowerState", "run_identity", "stored"]
