"""The ledger: what was spent on a population of clients, in a file that outlives every run.

    ledger = Ledger(Path("hospitals.jsonl"), population="six hospitals, 2026")
    ledger.charge(event, Budget(epsilon=8.0, delta=1e-3))      on the disk before it returns, or refused
    ledger.spent(delta=1e-3)

One file for all runs on the same people's data, whoever starts them: a second run, a rewound one, each trial of a
search for hyper-parameters and an initial adapter that was trained on these clients spend from it. Who starts a new
file for the same clients starts to lie; the file cannot know.

What is decided, and why:
* A charge is appended under a lock (flock), flushed (fsync of file and folder), and only then may anything leave. A
  charge without a release counts. The same release (run, round, digest of its bytes) is charged once: resuming is free.
* A last line without its end is a charge that was never finished: nothing left for it. The next charge cuts it off.
* Each line repeats the digest of the one before (`chain`); NAME.tip beside the file holds the newest. A ledger that was
  edited, or cut off behind a tip, is refused, and so is a tip without its ledger.
* The file knows itself by its inode. A copy is refused (both would spend the same budget); `adopt` goes on with one
  that was moved or restored, and a line says so for ever.
* A clock that goes back changes nothing: order is by number, times are for people.
* No locks in the file system: refused.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedlora.core import files
from fedlora.core.echo import quoted
from fedlora.errors import BudgetSpent, LedgerError
from fedlora.privacy import chain
from fedlora.privacy.chain import Book
from fedlora.privacy.events import Budget, Charged, Event, planned_on, spent_on
from fedlora.privacy.locked_file import content, held, put
from fedlora.privacy.recomputing import Recomputed, recompute

__all__ = ["Budget", "Charged", "Event", "Ledger", "Recomputed", "recompute"]


class Ledger:
    """What was spent on a population of clients. Nothing is cached: each question reads the file.

    Example:
        >>> from pathlib import Path
        >>> from fedlora.privacy import Budget, Event, Ledger, Mechanism
        >>> ledger = Ledger(Path("ledger.jsonl"), population="six sites")
        >>> event = Event.of(Mechanism.of(1.0, 1.0, size=100), 100, run="one", round=1, sampling=1.0, rounds=20,
        ...                  delta=1e-3, released=64 * "0")  # the journal knows the digest
        >>> charged = ledger.charge(event, Budget(epsilon=24.0, delta=1e-3))
        >>> charged.number, round(ledger.planned(delta=1e-3), 2)
        (1, 23.06)
    """

    def __init__(self, path: Path, population: str) -> None:
        """path: of the file, which the first charge makes. population: its name, chosen by the user, for good.

        Raises:
            LedgerError: no name.
        """
        if not isinstance(population, str) or not 1 <= len(population) <= 200 or not population.isprintable():
            raise LedgerError(
                f"the population's name is 1 to 200 letters that print (whose data is it?); got {quoted(population)}."
            )
        self.path, self.population = Path(os.path.realpath(path)), population

    def charge(self, event: Event, budget: Budget | None = None) -> Charged:
        """Write the event: whole, and on the disk when this returns. Only then may its release leave.

        Raises:
            BudgetSpent: with it the population would have spent more than the budget; nothing is charged.
            LedgerError: the file cannot be used; whether the event is in it, `events` tells.
        """
        if not event.released:
            raise LedgerError("an event is charged with the digest of what is released: `Journal.store` does both.")
        with held(self.path) as descriptor:
            book = self._begun(descriptor)
            for other in book.charged:
                if _same(other.event, event):
                    self._flush(descriptor, book)  # its own writer may have been killed before it did
                    return other
            self._require(book, event, budget, 1)
            return self._append(descriptor, book, event)

    def check(self, event: Event, budget: Budget | None, rounds: int = 1) -> None:
        """Ask before a round, or before a run: nothing is written.

        Raises:
            BudgetSpent: with `rounds` such events more the population would have spent more than the budget.
            LedgerError: the file cannot be used.
        """
        self._require(self._read(), event, budget, rounds)

    def events(self) -> tuple[Charged, ...]:
        """All that was charged; () where the file does not exist. Raises `LedgerError`."""
        book = self._read()
        return book.charged if book else ()

    def spent(self, delta: float) -> float:
        """Epsilon of all events. Raises `LedgerError`."""
        return spent_on((charged.event for charged in self.events()), delta)

    def planned(self, delta: float) -> float:
        """Epsilon of all events, and of the rounds that their runs planned beyond. Raises `LedgerError`."""
        return planned_on((charged.event for charged in self.events()), delta)

    def describe(self, delta: float) -> Mapping[str, Any]:
        """Plain values for metrics and card, all public. tip: to compare a later ledger with."""
        book = self._read()
        events = [charged.event for charged in book.charged] if book else []
        return {
            "population": self.population,
            "events": len(events),
            "delta": delta,
            "epsilon": spent_on(events, delta),
            "planned_epsilon": planned_on(events, delta),
            "tip": list(book.tip) if book else None,
        }

    def adopt(self, reason: str) -> None:
        """Go on with a file that was moved to another disk or restored from a backup. Only where the original will
        never be used again: else both spend one budget. A line in the file says so for ever.

        Raises:
            LedgerError: the file is not there, or damaged, or cut off.
        """
        if not isinstance(reason, str) or not reason.strip() or len(reason) > 500:
            raise LedgerError("say in a few words why the ledger is elsewhere now: it stays in it.")
        if not self.path.is_file():
            raise LedgerError(f"{self.path} does not exist: there is nothing to adopt.")
        with held(self.path) as descriptor:
            book = chain.read(content(descriptor), str(self.path))
            if book is None:
                raise LedgerError(f"{self.path} holds no ledger: there is nothing to adopt.")
            self._check(book, self._tip())
            inode = os.fstat(descriptor).st_ino
            self._write(descriptor, book, chain.moved_line(inode, reason, book.tip, _now()))

    @property
    def _tip_path(self) -> Path:
        return self.path.with_name(f"{self.path.name}.tip")

    def _read(self) -> Book | None:
        """What the file holds, without the lock: whole lines only grow, and the tip is read first."""
        tip = self._tip()
        try:
            raw = self.path.read_bytes()
        except FileNotFoundError:
            raw = b""
        except OSError as error:
            raise LedgerError(f"the ledger {self.path} cannot be read: {error.strerror or error}.") from error
        book = chain.read(raw, str(self.path))
        if book is None:
            self._require_none(tip)
            return None
        self._check(book, tip)
        return book

    def _begun(self, descriptor: int) -> Book:
        """The book of the locked file, which is made where it is new."""
        tip, inode = self._tip(), os.fstat(descriptor).st_ino
        book = chain.read(content(descriptor), str(self.path))
        if book is None:
            self._require_none(tip)
            os.ftruncate(descriptor, 0)
            put(descriptor, chain.header(self.population, secrets.token_hex(8), inode, _now()), 0)
            files.sync_folder(self.path.parent)
            book = chain.read(content(descriptor), str(self.path))
            if book is None:
                raise LedgerError(f"the ledger {self.path} cannot be written: the file stays empty.")
        if book.inode != inode:
            raise LedgerError(
                f"the ledger {self.path} is a copy: it was begun as another file (inode {book.inode}, this one is "
                f"{inode}). Two copies would spend one budget twice. Use the original; where it was moved to another "
                f"disk or restored, and the original is never used again, go on with Ledger.adopt(reason)."
            )
        self._check(book, tip)
        if tip is None and len(book.tips) == 1:  # begun just now, or its maker was killed before this
            self._write_tip(book)
        elif tip is None:
            raise LedgerError(
                f"{self._tip_path.name} is missing beside the ledger {self.path}: whether it was cut off cannot be "
                f"told. Restore both; where only the ledger was moved, see Ledger.adopt."
            )
        return book

    def _tip(self) -> tuple[Any, Any, Any] | None:
        """(id, number, digest) in the tip's file; None where there is none."""
        try:
            found = json.loads(self._tip_path.read_bytes())
            return found["id"], found["number"], found["digest"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise LedgerError(f"{self._tip_path} cannot be read ({error}). Restore it with its ledger.") from error

    def _check(self, book: Book, tip: tuple[Any, Any, Any] | None) -> None:
        """That it is this population's, and holds the tip. Raises `LedgerError`."""
        if book.population != self.population:
            raise LedgerError(
                f"the ledger {self.path} is of the population {quoted(book.population)}, not {quoted(self.population)}."
                f" Give each population its own file, and all runs on its clients the same one."
            )
        if tip is not None and (tip[0] != book.id or tip[1:] not in book.tips):
            raise LedgerError(
                f"the ledger {self.path} was cut off, changed or exchanged: its newest line is number "
                f"{book.tip[0]}, and {self._tip_path.name} knows line {quoted(tip[1])}, which is not in it. What was "
                f"spent cannot be told. Restore the ledger as it was."
            )

    def _require_none(self, tip: tuple[Any, Any, Any] | None) -> None:
        if tip is not None:
            raise LedgerError(
                f"the ledger {self.path} is gone or empty, and {self._tip_path.name} says that it was there. What was "
                f"spent on {quoted(self.population)} cannot be forgotten: restore the ledger."
            )

    def _require(self, book: Book | None, event: Event, budget: Budget | None, rounds: int) -> None:
        if budget is None:
            return
        before = [charged.event for charged in book.charged] if book else []
        after = spent_on([*before, *[event] * rounds], budget.delta)
        if after > budget.epsilon:
            raise BudgetSpent(
                f"{rounds} more release{'s' * (rounds > 1)} with noise multiplier {event.noise_multiplier:g} and "
                f"sampling {event.sampling:g} would bring population {quoted(self.population)} to epsilon {after:.4g} "
                f"at delta {budget.delta:g}; the budget is {budget.epsilon:g}, and {len(before)} releases have spent "
                f"{spent_on(before, budget.delta):.4g} of it. Plan fewer rounds or more noise. The past cannot be "
                f"taken back: a new file for the same clients would only hide it."
            )

    def _append(self, descriptor: int, book: Book, event: Event) -> Charged:
        now = _now()
        line = chain.event_line(event, book.tip, now)
        self._write(descriptor, book, line)
        return Charged(book.tip[0] + 1, now, chain.digest_of(line), event)

    def _write(self, descriptor: int, book: Book, line: bytes) -> None:
        """One more line, whole and lasting; after an error the file is as it was."""
        try:
            os.ftruncate(descriptor, book.length)  # what a killed writer left torn: nothing was released for it
            put(descriptor, line, book.length)
        except OSError:
            os.ftruncate(descriptor, book.length)
            raise
        after = chain.read(content(descriptor), str(self.path))
        if after is None or after.tip != (book.tip[0] + 1, chain.digest_of(line)):
            raise LedgerError(f"the ledger {self.path} does not hold what was written to it; nothing may be released.")
        files.sync_folder(self.path.parent)
        self._write_tip(after)

    def _flush(self, descriptor: int, book: Book) -> None:
        os.fsync(descriptor)
        files.sync_folder(self.path.parent)
        self._write_tip(book)

    def _write_tip(self, book: Book) -> None:
        number, digest = book.tip
        files.write(self._tip_path, chain.line_of({"number": number, "digest": digest, "id": book.id}))


def _same(one: Event, other: Event) -> bool:
    return (one.run, one.round, one.released) == (other.run, other.round, other.released)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
