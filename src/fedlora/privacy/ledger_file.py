"""The ledger's two files: the lines, and NAME.tip beside them, which holds the newest line's number and digest.

What is decided, and why:
* A line is appended under a lock (flock) and flushed (fsync of file and folder) before anything may leave for it.
* A last line without its end was never finished: nothing left for it. The next line cuts it off.
* A ledger that was edited, or cut off behind its tip, is refused, and so is a tip without its ledger.
* The file knows itself by its inode. A copy is refused: both would spend the same budget.
* No locks in the file system: refused.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlora.core import files
from fedlora.core.echo import quoted
from fedlora.errors import LedgerError
from fedlora.given_files import read_given
from fedlora.privacy import chain
from fedlora.privacy.chain import Book
from fedlora.privacy.locked_file import LARGEST, content, held, put

_Tip = tuple[Any, Any, Any]  # id, number, digest


@dataclass(frozen=True)
class LedgerFile:
    """Lines of one population's ledger, whole and lasting. path: with links resolved."""

    path: Path
    population: str

    def read(self) -> Book | None:
        """What it holds, without the lock: whole lines only grow, and the tip is read first. None: no such file.

        Raises:
            LedgerError: it cannot be read, was changed or cut off, or is of another population.
        """
        tip = self._tip()
        try:
            raw = read_given(self.path, LARGEST)
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

    @contextmanager
    def opened(self, now: str) -> Iterator[tuple[int, Book]]:
        """The locked file and its book, begun where it is new. Raises `LedgerError`, also for a copy."""
        with held(self.path) as descriptor:
            yield descriptor, self._begun(descriptor, now)

    def append(self, descriptor: int, book: Book, line: bytes) -> Book:
        """One more line, whole and lasting; after an error the file is as it was. Returns the book with it."""
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
        return after

    def flush(self, descriptor: int, book: Book) -> None:
        """What another writer may have been killed before."""
        os.fsync(descriptor)
        files.sync_folder(self.path.parent)
        self._write_tip(book)

    def adopt(self, reason: str, now: str) -> None:
        """A line that says that the file is this one from now on. Raises `LedgerError`: none is there, or damaged."""
        if not self.path.is_file():
            raise LedgerError(f"{self.path} does not exist: there is nothing to adopt.")
        with held(self.path) as descriptor:
            book = chain.read(content(descriptor), str(self.path))
            if book is None:
                raise LedgerError(f"{self.path} holds no ledger: there is nothing to adopt.")
            tip, inode = self._tip(), os.fstat(descriptor).st_ino
            self._check(book, tip)
            if inode == book.inode and tip is not None:
                raise LedgerError(f"{self.path} is the ledger itself, no copy of it: it goes on as it is.")
            self.append(descriptor, book, chain.moved_line(inode, reason, book.tip, now))

    @property
    def tip_path(self) -> Path:
        return self.path.with_name(f"{self.path.name}.tip")

    def _begun(self, descriptor: int, now: str) -> Book:
        tip, inode = self._tip(), os.fstat(descriptor).st_ino
        book = chain.read(content(descriptor), str(self.path))
        if book is None:
            self._require_none(tip)
            os.ftruncate(descriptor, 0)
            put(descriptor, chain.header(self.population, secrets.token_hex(8), inode, now), 0)
            files.sync_folder(self.path.parent)
            book = chain.read(content(descriptor), str(self.path))
            if book is None:
                raise LedgerError(f"the ledger {self.path} cannot be written: the file stays empty.")
        if book.inode != inode:
            raise LedgerError(
                f"the ledger {self.path} is a copy: it was begun as another file (inode {book.inode}, this one is "
                f"{inode}). Two copies would spend one budget twice. Use the original; where it was moved to another "
                f"disk or restored, and the original is never used again: fedlora privacy {self.path.name} --adopt "
                f"--because 'why it is here now'."
            )
        self._check(book, tip)
        if tip is None and len(book.tips) == 1:  # begun just now, or its maker was killed before this
            self._write_tip(book)
        elif tip is None:
            raise LedgerError(
                f"{self.tip_path.name} is missing beside the ledger {self.path}: whether it was cut off cannot be "
                f"told. Move or restore both together; where that file is lost for good, and this is the whole ledger "
                f"(compare its newest line with what cards say): fedlora privacy {self.path.name} --adopt --because "
                f"'what happened to it'."
            )
        return book

    def _tip(self) -> _Tip | None:
        """(id, number, digest) in the tip's file; None where there is none."""
        try:
            found = json.loads(self.tip_path.read_bytes())
            return found["id"], found["number"], found["digest"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise LedgerError(f"{self.tip_path} cannot be read ({error}). Restore it with its ledger.") from error

    def _check(self, book: Book, tip: _Tip | None) -> None:
        """That it is this population's, and holds the tip. Raises `LedgerError`."""
        if book.population != self.population:
            raise LedgerError(
                f"the ledger {self.path} is of the population {quoted(book.population)}, not {quoted(self.population)}."
                f" Give each population its own file, and all runs on its clients the same one."
            )
        if tip is not None and (tip[0] != book.id or tip[1:] not in book.tips):
            raise LedgerError(
                f"the ledger {self.path} was cut off, changed or exchanged: its newest line is number "
                f"{book.tip[0]}, and {self.tip_path.name} knows line {quoted(tip[1])}, which is not in it. What was "
                f"spent cannot be told. Restore the ledger as it was."
            )

    def _require_none(self, tip: _Tip | None) -> None:
        if tip is not None:
            raise LedgerError(
                f"the ledger {self.path} is gone or empty, and {self.tip_path.name} says that it was there. What was "
                f"spent on {quoted(self.population)} cannot be forgotten: restore the ledger."
            )

    def _write_tip(self, book: Book) -> None:
        number, digest = book.tip
        files.write(self.tip_path, chain.line_of({"number": number, "digest": digest, "id": book.id}))
