"""A node's work: receive a parcel, train, keep what stays home, answer. Its state is on its own disk.

Two states are kept, so that a round which the server lost can be played again from where it began: a client's work is
a function of what it receives and of its state before that round.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from flwr.app import RecordDict

from fedlora import checkpoint
from fedlora.client import Upload, keep, prune, receive, send
from fedlora.delivery import Cache, remember, unpack
from fedlora.errors import ConfigError, KeptStateError
from fedlora.flower.records import record_parcel, upload_record
from fedlora.lora import Adapter
from fedlora.simulation import Trainer


@dataclass(frozen=True, eq=False)
class NodeState:
    """What stays with a client. kept: local parts of its adapter. position: how far it has read its data. cache: what
    need not be sent to it again."""

    kept: Adapter | None = None
    position: int = 0
    cache: Cache | None = None


class Node:
    """One client's side of any number of rounds.

    Args:
        client: its registered name; work for another is refused. folder: where its state is kept, by run.
    """

    def __init__(self, client: str, trainer: Trainer, folder: Path, *, form: str = "factors") -> None:
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
        mine = receive(download, state.kept)
        trained = self._trainer.train(download, mine, state.position)
        made = trained.adapter
        if download.roles.penalty is not None:
            made = prune(mine, made, download.roles.penalty)
        kept = keep(made, download.roles)
        after = NodeState(kept, trained.position, remember(download, kept))
        _forget_after(folder, parcel.round)
        checkpoint.save(folder, parcel.round + 1, after, keep=2)
        upload = Upload(parcel.client, trained.num_examples, send(made, download.roles, self._form), self._form)  # type: ignore[arg-type]
        names = [*kept.modules, *kept.heads] if kept is not None else []
        return upload_record(upload, run=run, round=parcel.round, loss=trained.loss, kept=names)

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
