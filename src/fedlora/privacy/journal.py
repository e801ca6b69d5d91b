"""The journal: each noised sum of a run, written atomically and charged before any of it leaves.

    journal = Journal(run / "journal", ledger, budget)
    total = journal.stored(round, context)                    None: play the round, then
    total = journal.store(round, mechanism.noised(total), event, context)

The order is: draw, write (file and folder flushed), charge, release. If killed before the file exists, nobody has seen
the noise, and the round is played again. If killed between file and charge, `stored` charges and returns the same
bytes. If killed later, it returns them and charges nothing. So one sum never leaves with two noises, noise never serves
two sums (it exists only within its sum), and everything released was charged. The exact sum is never written.

A file is one line of JSON (round, event, context) and the sum as int64, little-endian; its name ends with the first 16
letters of its SHA-256, and the ledger holds all 64. A charged file is private and may be shown; the folder stays with
the server, because a kill can leave a draw in it that was never charged.

If the ledger lost events that this journal has, they are charged again, because they were released.

A damaged file is refused, never redrawn automatically: that would be a second release. Anyone who removes it does so
knowingly, and the ledger then holds two events for the round.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlora.core import files
from fedlora.core.text import quoted
from fedlora.errors import LedgerError, ShapeError
from fedlora.privacy.events import Budget, Charged, Event
from fedlora.privacy.ledger import Ledger

_NAME = re.compile(r"round-(\d{5,})-([0-9a-f]{16})\.noised")
_VERSION = 1


@dataclass(frozen=True, eq=False)
class _Entry:
    """A journal file. event: including the digest of the file's bytes."""

    round: int
    context: str
    event: Event
    released: Tensor


class Journal:
    """One run's noised sums. Only one process at a time holds the run's folder (`RunFolder.held`).

    Example:
        >>> from pathlib import Path
        >>> import torch
        >>> from fedlora.privacy import Event, Journal, Ledger, Mechanism
        >>> mechanism, ledger = Mechanism.of(1.0, 1.0, size=3), Ledger(Path("sites.jsonl"), population="six sites")
        >>> journal = Journal(Path("run/journal"), ledger)
        >>> event = Event.of(mechanism, 3, run="one", round=1, sampling=1.0, rounds=20, delta=1e-3)
        >>> total = mechanism.contribution(torch.tensor([0.6, 0.8, 0.0]))
        >>> left = journal.store(1, mechanism.noised(total), event)
        >>> torch.equal(journal.stored(1), left), len(ledger.events())
        (True, 1)
    """

    def __init__(self, folder: Path, ledger: Ledger, budget: Budget | None = None) -> None:
        """folder: for this journal only. budget: the most that the population may have spent; None: no limit."""
        self.folder, self.ledger, self.budget = Path(folder), ledger, budget

    def stored(self, round: int, context: str = "") -> Tensor | None:
        """The round's noised sum, int64 (d,), charged by now; None if none was written.

        Call it before playing a round: if it returns a sum, nobody trains and no noise is drawn.

        context: a digest of everything the sum's meaning depends on: the round's starting state, bases, configuration.
        A sum with another context is refused, since it would be lifted into the wrong space.

        Raises:
            LedgerError: the file is damaged, or has another context. BudgetSpent: the run was killed before the charge
                and the budget was spent meanwhile, so the sum may no longer leave.
        """
        self._sweep()
        self._settle(round)
        entry = self._entry(round)
        if entry is None:
            return None
        if entry.context != context:
            raise LedgerError(
                f"the journal {self.folder} holds a noised sum of round {round} that was made from another state or "
                f"configuration than this one. It cannot be used here, and drawing another would be a second release. "
                f"Continue from the checkpoints that belong to it, or start a run in a new folder (charged anew)."
            )
        files.sync_folder(self.folder)
        self.ledger.charge(entry.event, self.budget)
        return entry.released

    def store(self, round: int, released: Tensor, event: Event, context: str = "") -> Tensor:
        """Write the noised sum, then charge it. Returns the sum read back from the file, which may now leave.

        Args:
            released: int64 (d,), from `Mechanism.noised`. event: this round's; its digest is set here.

        Raises:
            LedgerError: the round already has a sum, or the disk refuses. BudgetSpent: the budget would be exceeded;
                calling `Ledger.check` before a round saves the work. ShapeError: not int64 of the event's size.
        """
        if released.ndim != 1 or released.dtype != torch.int64 or len(released) != event.size:
            raise ShapeError(
                f"this event's noised sum must be int64 ({event.size},); got {tuple(released.shape)} {released.dtype}."
            )
        if event.round != round:
            raise LedgerError(f"an event of round {event.round} was passed for round {round}.")
        if self._files(round):
            raise LedgerError(
                f"the journal {self.folder} already has a noised sum of round {round}; a round is released once. Call "
                f"`stored` before playing the round."
            )
        self.ledger.check(event, self.budget)
        raw = _encoded(round, released, replace(event, released=""), context)
        path = self.folder / f"round-{round:05d}-{hashlib.sha256(raw).hexdigest()[:16]}.noised"
        try:
            files.write(path, raw)
        except OSError as error:
            raise LedgerError(f"{path} cannot be written ({error.strerror}); nothing was released.") from error
        found = self.stored(round, context)
        if found is None or not torch.equal(found, released.cpu()):
            raise LedgerError(f"{path} does not hold what was written to it; nothing may be released.")
        return found

    def _sweep(self) -> None:
        """Remove half-written files of killed writers: draws that were neither charged nor used."""
        files.sweep(self.folder)

    def _settle(self, but: int) -> None:
        """Charge other rounds that the ledger lacks, whatever the budget: their sums may have left."""
        known = {charged.event.released[:16] for charged in self.ledger.events()}
        for round, digest, _ in self._listed():
            if round != but and digest not in known and (entry := self._entry(round)) is not None:
                self.ledger.charge(entry.event, left=True)

    def charged(self) -> dict[int, Charged]:
        """Round -> its event in the ledger, for the sums in this folder. Raises `LedgerError`."""
        in_ledger = {charged.event.released: charged for charged in self.ledger.events()}
        found = {}
        for round in sorted({round for round, _, _ in self._listed()}):
            entry = self._entry(round)
            if entry is not None and entry.event.released in in_ledger:
                found[round] = in_ledger[entry.event.released]
        return found

    def _entry(self, round: int) -> _Entry | None:
        """A round's file; None if there is none."""
        named = self._files(round)
        if len(named) > 1:
            raise LedgerError(
                f"the journal {self.folder} has {len(named)} noised sums of round {round}: two runs wrote to it, or "
                f"files were added. It is unknown which one was released. Start a run in a new folder."
            )
        if not named:
            return None
        digest, path = named[0]
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise LedgerError(f"{path} cannot be read: {error.strerror or error}.") from error
        whole = hashlib.sha256(raw).hexdigest()
        entry = _decoded(raw, path.name) if whole[:16] == digest else None
        if entry is None or entry.round != round:
            raise LedgerError(
                f"{path} is damaged: its content does not match its name. It was written whole, so the disk or a hand "
                f"changed it. Restore it: its sum may be released already, and another draw would be a second release."
            )
        return replace(entry, event=replace(entry.event, released=whole))

    def _files(self, round: int) -> list[tuple[str, Path]]:
        return [(digest, path) for found, digest, path in self._listed() if found == round]

    def _listed(self) -> list[tuple[int, str, Path]]:
        """Each file's (round, digest, path)."""
        named = [(_NAME.fullmatch(path.name), path) for path in sorted(self.folder.glob("round-*.noised"))]
        return [(int(match[1]), match[2], path) for match, path in named if match]


def _encoded(round: int, released: Tensor, event: Event, context: str) -> bytes:
    head = {"journal": _VERSION, "round": round, "context": context, "event": event.plain()}
    body = bytearray(8 * len(released))
    torch.frombuffer(body, dtype=torch.int64).copy_(released.cpu())
    return json.dumps(head, sort_keys=True, allow_nan=False).encode() + b"\n" + _little(bytes(body))


def _decoded(raw: bytes, name: str) -> _Entry:
    """Raises `LedgerError` if bytes match their digest but are not a journal entry."""
    head, _, body = raw.partition(b"\n")
    try:
        found: dict[str, Any] = json.loads(head)
        event = Event.from_plain(found["event"])
        if found["journal"] != _VERSION or not isinstance(found["context"], str) or len(body) != 8 * event.size:
            raise ValueError(f"version {quoted(found['journal'])} with {len(body)} bytes")
        released = torch.frombuffer(bytearray(_little(body)), dtype=torch.int64)
        return _Entry(found["round"], found["context"], event, released)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise LedgerError(f"{name} is not an entry of a journal of this version: {error}.") from error


def _little(raw: bytes) -> bytes:
    """Convert 64-bit integers between this machine's byte order and the file's little-endian one."""
    if sys.byteorder == "little":
        return raw
    return b"".join(raw[at : at + 8][::-1] for at in range(0, len(raw), 8))
