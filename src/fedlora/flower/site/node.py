"""A node's work: receive a parcel, train, keep what stays home, answer. Its state is on its own disk.

It keeps two states, so that a round which the server lost can be repeated from its beginning: a client's work depends
only on what it receives and on its state before that round.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from flwr.app import RecordDict

from fedlora.client import play_round
from fedlora.core import checkpoint
from fedlora.core.lora import Adapter
from fedlora.core.messages import ClientMemory, Form
from fedlora.core.parcels import Cache, Parcel, remember, unpack
from fedlora.core.read_only import ReadOnly
from fedlora.core.trainer import Trainer
from fedlora.errors import ConfigError, KeptStateError
from fedlora.flower.messages.envelope import opened
from fedlora.flower.messages.measuring import Evaluators, asked_part, measured_record
from fedlora.flower.messages.records import record_parcel, upload_record
from fedlora.flower.terms.agreement import Facts, check

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class NodeState:
    """What stays with a client. kept: local parts of its adapter. position: how far it has read its data. cache: what
    need not be sent to it again since it trained. measured: the same since it measured: a server that was killed in
    between knows of the former only."""

    TAG: ClassVar[str] = "node/1"

    kept: Adapter | None = None
    position: int = 0
    cache: Cache | None = None
    measured: Cache | None = None

    def fitting(self, parcel: Parcel) -> Cache | None:
        """The cache for which a parcel was packed; None: there is none."""
        return next((one for one in (self.cache, self.measured) if one is not None and one.held == parcel.held), None)


class Node:
    """One client's side of any number of rounds.

    Args:
        client: its registered name; work for another is refused. folder: for its states, by run. evaluators: of its
            held-out data, "validation" and "test". facts: what the trainer really has; the server must have the same.
    """

    def __init__(
        self,
        client: str,
        trainer: Trainer,
        folder: Path,
        *,
        form: Form = "factors",
        evaluators: Evaluators = ReadOnly({}),  # noqa: B008 - immutable
        facts: Facts = Facts(),  # noqa: B008 - immutable
    ) -> None:
        self._client, self._trainer, self._folder = client, trainer, folder
        self._form, self._evaluators, self._facts = form, evaluators, facts
        self._told: set[str] = set()

    def work(self, record: RecordDict) -> RecordDict:
        """Play a round: the reply to the server's message.

        Raises:
            KeptStateError: the parcel leaves out a part that this node no longer has. RecordError: not a message of
                fedlora. Disagreement: the server has another base model, other classes, ...; nothing is trained.
        """
        parcel, run = self._read(record)
        folder = state_of(self._folder, run, self._client)
        state = self._state(run, parcel.round)
        download = unpack(parcel, state.fitting(parcel))
        played = play_round(download, ClientMemory(state.kept, state.position), self._trainer, self._form)
        kept = played.memory.kept
        after = NodeState(kept, played.memory.position, remember(download, kept))
        _forget_after(folder, parcel.round)
        checkpoint.save(folder, parcel.round + 1, after, of=f"{run}/{self._client}", keep=2)
        names = [*kept.modules, *kept.heads] if kept is not None else []
        return upload_record(
            played.upload, run=run, round=parcel.round, loss=played.loss, kept=names, facts=self._facts
        )

    def measure(self, record: RecordDict) -> RecordDict:
        """The scores of the readout that came, on what is held out here. It is stored, all of it, and need not come
        again for the round that trains it; what else stays here is not changed.

        Raises:
            ConfigError: nothing is held out. KeptStateError: as in `work`, or what stays here is not of that round.
        """
        parcel, run = self._read(record)
        state = self._state(run, parcel.round)
        download = unpack(parcel, state.fitting(parcel))
        answer = measured_record(download, state.kept, run, asked_part(record), self._evaluators)
        measured = remember(download, state.kept, untrained=True)
        if state.measured is None or state.measured.held != measured.held:
            folder = state_of(self._folder, run, self._client)
            checkpoint.save(folder, parcel.round, replace(state, measured=measured), of=f"{run}/{self._client}", keep=2)
        return answer

    def _read(self, record: RecordDict) -> tuple[Parcel, str]:
        """The parcel and the federation's name, from a server that agrees with this site."""
        theirs = opened(record, "the server", "this site").facts
        for line in check(Facts.from_text(theirs) if theirs else Facts(), self._facts, self._client):
            if line not in self._told:
                log.warning("%s", line)
                self._told.add(line)
        parcel, run = record_parcel(record)
        if parcel.client.id != self._client:
            raise ConfigError(f"this node is {self._client!r}, and the work is for {parcel.client.id!r}.")
        return parcel, run

    def _state(self, run: str, round: int) -> NodeState:
        folder, of = state_of(self._folder, run, self._client), f"{run}/{self._client}"
        try:
            loaded = checkpoint.load_newest(folder, NodeState, of=of, upto=round, tell=log.warning)
        except Exception as error:
            raise KeptStateError(f"the state in {folder} cannot be read: {error}") from error
        if loaded is None and round > 0 and any(folder.glob("round-*.safetensors")):
            raise KeptStateError(f"the state before round {round + 1} is not in {folder} any more, only later ones.")
        return loaded[1] if loaded else NodeState()


def state_of(folder: Path, run: str, client: str) -> Path:
    """A client's folder for one run, below the folder of all states."""
    return folder / re.sub(r"[^A-Za-z0-9._-]", "-", run) / client


def _forget_after(folder: Path, round: int) -> None:
    """Remove states of later rounds than the current one: they belong to a trajectory that the server left, and keeping
    the newest two must never drop the state from which this round started."""
    for path in folder.glob("round-*.safetensors"):
        number = path.name.split(".")[0].removeprefix("round-")
        if number.isdigit() and int(number) > round:
            path.unlink(missing_ok=True)
