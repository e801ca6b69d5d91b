"""The journal: each noised sum of a run, written atomically and charged before any of it leaves.

    journal = Journal(run / "journal", ledger, budget)
    total = journal.stored(round, context)                    None: play the round, then
    total = journal.store(mechanism.noised(total), event, context)

The order is: draw, check the budget, write (file and folder flushed), charge, release. If killed before the file
exists, nobody has seen the noise, and the round is played again. If killed between file and charge, `stored` charges
and returns the same bytes. If killed later, it returns them and charges nothing. So one sum never leaves with two
noises, noise never serves two sums (it exists only within its sum), and everything released was charged. The exact sum
is never written.

A file is one line of JSON (round, event, context) and the sum as int64, little-endian; its name ends with the first 16
letters of its SHA-256, and the ledger holds all 64. A charged file is private and may be shown; the folder stays with
the server, because a kill can leave a draw in it that was never charged. A damaged file is refused, never redrawn: that
would be a second release.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from fedlora.core import files
from fedlora.errors import LedgerError
from fedlora.privacy.events import Budget, Event
from fedlora.privacy.ledger import Ledger

_VERSION = 1


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
        >>> left = journal.store(mechanism.noised(total), event)
        >>> torch.equal(journal.stored(1), left), len(ledger.read().events)
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
        files.sweep(self.folder)  # half-written files of killed writers: draws that were neither charged nor used
        paths = self._paths(round)
        if not paths:
            return None
        if len(paths) > 1:
            raise LedgerError(
                f"the journal {self.folder} has {len(paths)} noised sums of round {round}: two runs wrote to it, or "
                f"files were added. It is unknown which one was released. Start a run in a new folder."
            )
        event, known, released = _read(paths[0], round)
        if known != context:
            raise LedgerError(
                f"the journal {self.folder} holds a noised sum of round {round} that was made from another state or "
                f"configuration than this one. It cannot be used here, and drawing another would be a second release. "
                f"Continue from the checkpoints that belong to it, or start a run in a new folder (charged anew)."
            )
        files.sync_folder(self.folder)  # its writer may have been killed before
        self.ledger.charge(event, self.budget)
        return released

    def store(self, released: Tensor, event: Event, context: str = "") -> Tensor:
        """Write the noised sum, then charge it. Returns the sum read back from the file, which may now leave.

        Args:
            released: int64 (d,), from `Mechanism.noised`. event: this round's; its digest is set here.

        Raises:
            LedgerError: the round already has a sum, or the disk refuses. BudgetSpent: the budget would be exceeded;
                calling `Ledger.check` before a round saves the work.
        """
        if self._paths(round := event.round):
            raise LedgerError(
                f"the journal {self.folder} already has a noised sum of round {round}; a round is released once. Call "
                f"`stored` before playing the round."
            )
        self.ledger.check(event, self.budget)
        head = {"journal": _VERSION, "round": round, "context": context, "event": asdict(replace(event, released=""))}
        raw = json.dumps(head, sort_keys=True, allow_nan=False).encode() + b"\n"
        raw += struct.pack(f"<{event.size}q", *released.tolist())
        path = self.folder / f"round-{round:05d}-{hashlib.sha256(raw).hexdigest()[:16]}.noised"
        try:
            files.write(path, raw)
        except OSError as error:
            raise LedgerError(f"{path} cannot be written ({error.strerror}); nothing was released.") from error
        found = self.stored(round, context)
        assert found is not None, "it was written"
        return found

    def _paths(self, round: int) -> list[Path]:
        named = re.compile(rf"round-{round:05d}-[0-9a-f]{{16}}\.noised")
        return [path for path in self.folder.glob("round-*.noised") if named.fullmatch(path.name)]


def _read(path: Path, round: int) -> tuple[Event, str, Tensor]:
    """The event with the digest of the file's bytes, the context, and the sum. Raises `LedgerError`."""
    try:
        raw = path.read_bytes()
        digest = hashlib.sha256(raw).hexdigest()
        head, _, body = raw.partition(b"\n")
        found = json.loads(head)
        event = replace(Event(**found["event"]), released=digest)
        released = torch.tensor(struct.unpack(f"<{event.size}q", body), dtype=torch.int64)
        if not path.stem.endswith(digest[:16]) or (found["journal"], found["round"]) != (_VERSION, round):
            raise ValueError("its content does not match its name")
    except (OSError, ValueError, TypeError, KeyError, RecursionError, struct.error) as error:
        raise LedgerError(
            f"{path} cannot be read, or is damaged ({error}). It was written whole, so the disk or a hand changed it. "
            f"Restore it: its sum may be released already, and another draw would be a second release."
        ) from error
    return event, found["context"], released
