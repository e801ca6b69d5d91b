"""A node's work: receive a parcel, train, keep what stays home, answer. Its state is on its own disk.

Two states are kept, so that a round which the server lost can be played again from where it began: a client's work is
a function of what it receives and of its state before that round.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from flwr.app import RecordDict

from fedlora.client import play_round
from fedlora.core import checkpoint
from fedlora.core.lora import Adapter
from fedlora.core.messages import ClientMemory, Form
from fedlora.core.parcels import Cache, remember, unpack
from fedlora.core.trainer import Trainer
from fedlora.errors import ConfigError, KeptStateError
from fedlora.flower.records import record_parcel, upload_record


@dataclass(frozen=True, eq=False)
class NodeState:
    """What stays with a client. kept: local parts of its adapter. position: how far it has read its data. cache: what
    need not be sent to it again."""

    TAG: ClassVar[str] = "node/1"

    kept: Adapter | None = None
    position: int = 0
    cache: Cache | None = None


class Node:
    """One client's side of any number of rounds.

    Args:
        client: its registered name; work for another is refused. folder: where its state is kept, by run.
    """

    def __init__(self, client: str, trainer: Trainer, folder: Path, *, form: Form = "factors") -> None:
        self._client, self._trainer, self._folder = client, trainer, folder
        self._form = form

    def work(self, record: RecordDict) -> RecordDict:
        """A round: the reply to the server's message.

        Raises:
            KeptStateError: the parcel leaves out what this node no longer has. RecordError: no message of ours.
        """
        parcel, run = record_parcel(record)
        if parcel.client.id != self._client:
            raise ConfigError(f"this node is {self._client!r}, and the work is for {parcel.client.id!r}.")
        folder = self._folder / re.sub(r"[^A-Za-z0-9._-]", "-", run) / self._client
        state = self._state(folder, parcel.round)
        download = unpack(parcel, state.cache)
        played = play_round(download, ClientMemory(state.kept, state.position), self._trainer, self._form)
        kept = played.memory.kept
        after = NodeState(kept, played.memory.position, remember(download, kept))
        _forget_after(folder, parcel.round)
        checkpoint.save(folder, parcel.round + 1, after, keep=2)
        names = [*kept.modules, *kept.heads] if kept is not None else []
        return upload_record(played.upload, run=run, round=parcel.round, loss=played.loss, kept=names)

    def _state(self, folder: Path, round: int) -> NodeState:
        try:
            loaded = checkpoint.load_newest(folder, NodeState, upto=round)
        except Exception as error:
            raise KeptStateError(f"the state in {folder} cannot be read: {error}") from error
        if loaded is None and round > 0 and any(folder.glob("round-*.safetensors")):
            raise KeptStateError(f"the state before round {round + 1} is not in {folder} any more, only later ones.")
        return loaded[1] if loaded else NodeState()


def _forget_after(folder: Path, round: int) -> None:
    """Remove states of later rounds than the one that is being played: they are of a trajectory that the server left,
    and keeping the newest two must never drop the one that this round started from."""
    for path in folder.glob("round-*.safetensors"):
        number = path.name.split(".")[0].removeprefix("round-")
        if number.isdigit() and int(number) > round:
            path.unlink(missing_ok=True)
