"""A node's work: receive a parcel, train, keep what stays home, answer. Its state is on its own disk.

A client's work depends only on what it receives and on its state after the last round in which its work counted. The
server names that round in each question (`envelope.Receipt`), and the node begins with exactly that state. So work that
was refused or late, and rounds that the server lost, leave no trace in the node's state.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path

from flwr.app import RecordDict

from fedlora.client import begin_round, finish_round
from fedlora.core import checkpoint
from fedlora.core.lora import Adapter
from fedlora.core.messages import ClientMemory
from fedlora.core.parcels import Cache, Parcel, remember, unpack
from fedlora.core.text import quoted
from fedlora.core.trainer import Trainer
from fedlora.errors import ConfigError, KeptStateError
from fedlora.flower.envelope import Receipt, RecordError, opened, receipt_of
from fedlora.flower.records import record_parcel, upload_record
from fedlora.flower.scores import Evaluators, asked_part, measured_record

log = logging.getLogger(__name__)
_KEPT = 4  # states: of the round in progress, the one that it began with, and that one's own


@dataclass(frozen=True, eq=False)
class NodeState:
    """What stays with a client after one round's work. kept: local parts of its adapter. position: how far it has read
    its data. cache: what it received for training and need not be sent again. measured: the same, received for a
    measurement; a server that was killed in between knows only `cache`. began: the round that this work began with."""

    kept: Adapter | None = None
    position: int = 0
    cache: Cache | None = None
    measured: Cache | None = None
    began: int = 0

    def fitting(self, parcel: Parcel) -> Cache | None:
        """The cache that the parcel relies on; None: there is none."""
        return next((one for one in (self.cache, self.measured) if one is not None and one.held == parcel.held), None)


class Node:
    """One client's side of any number of rounds.

    Args:
        client: its registered name; work for another is refused. folder: for its states, by run. evaluators: for its
            held-out data, "validation" and "test". terms: of its join.toml; the server's must be the same. run: the
            only one that it works for; None: any.
    """

    def __init__(
        self, client: str, trainer: Trainer, folder: Path, *, evaluators: Evaluators | None = None,
        terms: str = "", run: str | None = None,
    ) -> None:  # fmt: skip
        self._client, self._trainer, self._folder, self._run = client, trainer, folder, run
        self._evaluators, self._terms = evaluators or {}, terms

    def work(self, record: RecordDict) -> RecordDict:
        """Play a round: the reply to the server's message.

        Raises:
            KeptStateError: the parcel leaves out a part that this node no longer has, or the state to continue from is
                missing. RecordError: not a message of fedlora. ConfigError: the server plays by other terms; nothing is
                trained. UploadRefused: training diverged in a part that stays here.
        """
        parcel, run, receipt, folder, of = self._read(record)
        state = self._state(folder, of, parcel, receipt)
        download = unpack(parcel, state.fitting(parcel))
        job = begin_round(download, ClientMemory(state.kept, state.position))
        _forget(folder, receipt.counted, state.began)
        played = finish_round(job, self._trainer.train(job.download, job.adapter, job.position))
        kept = played.memory.kept
        after = NodeState(kept, played.memory.position, remember(download, kept), began=receipt.counted)
        checkpoint.save(folder, parcel.round + 1, after, of=of, keep=_KEPT)
        names = [*kept.modules, *kept.heads] if kept is not None else []
        return upload_record(played.upload, run=run, round=parcel.round, loss=played.loss, kept=names)

    def measure(self, record: RecordDict) -> RecordDict:
        """Scores the received readout on this site's held-out data. The site stores the whole readout, so that the next
        round's training message can leave it out; the rest of its state does not change.

        Raises:
            ConfigError: nothing is held out. KeptStateError: as in `work`.
        """
        parcel, run, receipt, folder, of = self._read(record)
        state = self._state(folder, of, parcel, receipt)
        download = unpack(parcel, state.fitting(parcel))
        answer = measured_record(download, state.kept, run, asked_part(record), self._evaluators)
        measured = remember(download, state.kept, untrained=True)
        if state.measured is None or state.measured.held != measured.held:
            checkpoint.save(folder, receipt.counted, replace(state, measured=measured), of=of, keep=_KEPT)
        return answer

    def _read(self, record: RecordDict) -> tuple[Parcel, str, Receipt, Path, str]:
        """The parcel, the federation's name, and the receipt, from a server that agrees with this site; the folder of
        this client's states in that federation, and whose they are."""
        if opened(record, "the server", "this site") != self._terms:
            raise ConfigError(
                "the server plays by other settings than this site's join.toml has, and nothing was done: the site "
                "needs the server's FED/join.toml of today in place of its own."
            )
        parcel, run = record_parcel(record)
        if parcel.client.id != self._client:
            raise ConfigError(f"this node is {self._client!r}, and the work is for {parcel.client.id!r}.")
        if self._run not in (None, run):
            raise ConfigError(
                f"this site joined {self._run!r}, and the work is for {quoted(run, 80)}: nothing is done."
            )
        receipt = receipt_of(record)
        if not receipt.counted <= parcel.round < 10**9:
            raise RecordError(f"the message is of round {parcel.round}, and its receipt of {receipt.text()}.")
        folder = self._folder / re.sub(r"[^A-Za-z0-9._-]|^\.", "-", run) / self._client
        return parcel, run, receipt, folder, f"{run}/{self._client}"

    def _state(self, folder: Path, of: str, parcel: Parcel, receipt: Receipt) -> NodeState:
        """The state after the last round in which this client's work counted. A site whose folder was emptied starts
        from nothing, and stores that, because later rounds may name the same state."""
        try:
            found = checkpoint.load_newest(folder, NodeState, of=of, upto=receipt.counted, tell=log.warning)
        except Exception as error:
            raise KeptStateError(f"the state in {folder} cannot be read: {error} {_WAY_OUT}") from error
        round, state = found or (0, NodeState())
        if round == receipt.counted:  # 0: of a measurement at most
            return state
        there = sorted({number for number, _ in _states(folder)})
        what = f"the state after round {receipt.counted}, the last in which work of {self._client!r} counted,"
        if there and _keeps(parcel):
            missing = "is damaged" if receipt.counted in there else "is not there"
            raise KeptStateError(
                f"{what} {missing}: {folder} has that of round {', '.join(map(str, there))}. Was this folder, or "
                f"the server's, set back to a backup? {_WAY_OUT}"
            )
        way = f"this site continues its data from round {round}" if found else "this site starts from nothing"
        log.warning("%s is not in %s: %s", what, folder, way)
        checkpoint.save(folder, receipt.counted, state, of=of, keep=_KEPT)
        return state


_WAY_OUT = (
    "Restore a backup of this folder, or of the server's, so that both are from the same round. Or stop this site's "
    "node and empty the folder: the site then begins from the common start, without the parts that only it had."
)


def _keeps(parcel: Parcel) -> bool:
    """Whether the client trains a part that only it has."""
    return bool(parcel.start.modules or parcel.start.heads or (parcel.held is not None and parcel.held.local))


def _states(folder: Path) -> list[tuple[int, Path]]:
    """(round, file) for each state in a folder: the state after that round."""
    named = [(path.name.split(".")[0].removeprefix("round-"), path) for path in folder.glob("round-*.safetensors")]
    return [(int(number), path) for number, path in named if number.isdigit()]


def _forget(folder: Path, *kept: int) -> None:
    """Remove the states that no later round can begin with: from work that did not count, or from rounds that the
    server lost. The state before the one that counted stays, because a server may lose its last checkpoint."""
    for number, path in _states(folder):
        if number not in kept:
            path.unlink(missing_ok=True)


__all__ = ["Node"]
