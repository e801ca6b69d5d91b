"""The ledger's two files: the lines, and NAME.tip beside them with the newest line's number and digest.

A third one lies elsewhere and records what is known about the ledger: `outside`.

Decisions, and why:
* A line is appended under a lock (flock) and flushed (fsync of file and folder) before its release may leave.
* A last line without its end was never finished, and nothing left for it. The next line overwrites it.
* A ledger that was edited, or truncated behind its tip, is refused, and so is a tip without its ledger.
* Only one file is the ledger: it has the mark recorded outside, is where that record says, and holds the newest line
  written. Copies and older versions are refused, because both would spend the same budget. The record is written last,
  before anything may leave for the line: a writer killed before that released nothing, and its line counts.
* A file system without locks is refused.
* The modification time encodes the newest line's number, not when it was written (`chain`).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlora.core import files
from fedlora.core.text import quoted
from fedlora.errors import LedgerError
from fedlora.given_files import parse_json, read_given
from fedlora.privacy import chain
from fedlora.privacy.chain import Book
from fedlora.privacy.locked_file import LARGEST, content, held, put
from fedlora.privacy.outside import Outside, elsewhere
from fedlora.privacy.released import TIMELESS

_Tip = tuple[Any, Any, Any]  # id, number, digest


@dataclass(frozen=True)
class LedgerFile:
    """The lines of one population's ledger, complete and durable. path: with links resolved."""

    path: Path
    population: str
    state: Path | None = None  # where the outside record is; None: `outside.state_folder`

    def read(self) -> Book | None:
        """Its content, read without the lock: complete lines only grow, and the tip is read first. None: no such file.

        Raises:
            LedgerError: it cannot be read, was changed or truncated, or belongs to another population.
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
    def opened(self) -> Iterator[tuple[int, Book]]:
        """The locked file and its book, created if new. Raises `LedgerError`, also for a copy."""
        with held(self.path) as descriptor:
            book, outside = self._begun(descriptor), self._outside
            with outside(book).held():
                tip = self._tip()
                self._check(book, tip)
                self._require_own(book, outside(book).read())
                self._require_tip(book, tip)
                yield descriptor, book

    def read_own(self) -> Book | None:
        """`read`, but raises `LedgerError` also for a copy, and if the outside record cannot be written."""
        book = self.read()
        if book is None:
            Outside("ledgers", "new", self.state).check_writable()
            return None
        known = self._outside(book).read()
        book = self.read() or book  # after the outside record, since lines only grow
        self._require_own(book, known)
        return book

    def append(self, descriptor: int, book: Book, line: bytes) -> Book:
        """Append a line durably; after an error the file is unchanged. Returns the book with it."""
        try:
            os.ftruncate(descriptor, book.length)  # drops a killed writer's torn line, for which nothing was released
            put(descriptor, line, book.length)
        except OSError:
            os.ftruncate(descriptor, book.length)
            raise
        after = chain.read(content(descriptor), str(self.path))
        if after is None or after.tip != (book.tip[0] + 1, chain.digest_of(line)):
            raise LedgerError(f"the ledger {self.path} does not hold what was written to it; nothing may be released.")
        files.sync_folder(self.path.parent)
        self._keep_tip(after)
        return after

    def flush(self, descriptor: int, book: Book) -> None:
        """Finish what another writer may have been killed before doing."""
        os.fsync(descriptor)
        files.sync_folder(self.path.parent)
        self._keep_tip(book)

    def adopt(self, reason: str) -> None:
        """Append a line saying that this file is the ledger from now on. Raises `LedgerError` if missing or damaged."""
        if not self.path.is_file():
            raise LedgerError(f"{self.path} does not exist: there is nothing to adopt.")
        with held(self.path) as descriptor:
            book = chain.read(content(descriptor), str(self.path))
            if book is None:
                raise LedgerError(f"{self.path} holds no ledger: there is nothing to adopt.")
            outside = self._outside(book)
            with outside.held():
                tip, known = self._tip(), outside.read()
                self._check(book, tip)
                self._require_newest(book, known)
                if tip is not None and not self._strange(book, known):
                    raise LedgerError(f"{self.path} is the ledger itself, not a copy: it needs no adoption.")
                mark = secrets.token_hex(8)
                self._know(book, mark)  # from here on the other file is refused, and this one until it has its line
                self.append(descriptor, book, chain.moved_line(mark, reason, book.tip))

    @property
    def tip_path(self) -> Path:
        return self.path.with_name(f"{self.path.name}.tip")

    def _begun(self, descriptor: int) -> Book:
        book = chain.read(content(descriptor), str(self.path))
        if book is None:
            self._require_none(self._tip())
            os.ftruncate(descriptor, 0)
            header = chain.header(self.population, secrets.token_hex(8), secrets.token_hex(8))
            begun = chain.read(header, str(self.path))
            assert begun is not None
            self._know(begun, begun.mark)  # before the line, because a ledger without an outside record is a copy
            put(descriptor, header, 0)
            files.sync_folder(self.path.parent)
            book = chain.read(content(descriptor), str(self.path))
            if book is None:
                raise LedgerError(f"the ledger {self.path} cannot be written: the file stays empty.")
        return book

    def _require_tip(self, book: Book, tip: _Tip | None) -> None:
        if tip is None and len(book.tips) == 1:  # just begun, or its creator was killed before writing the tip
            self._write_tip(book)
        elif tip is None:
            raise LedgerError(
                f"{self.tip_path.name} is missing beside the ledger {self.path}, so nobody can see whether the ledger "
                f"was cut off. Move or restore both together; if that file is lost for good, and this is the whole "
                f"ledger (compare its newest line with what cards say): fedlora privacy {self.path.name} --adopt "
                f"--because 'what happened to it'."
            )

    def _tip(self) -> _Tip | None:
        """(id, number, digest) from the tip's file; None if there is none."""
        try:
            found = parse_json(read_given(self.tip_path))
            return found["id"], found["number"], found["digest"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            why = getattr(error, "strerror", None) or error
            raise LedgerError(f"{self.tip_path} cannot be read ({why}). Restore it with its ledger.") from error

    def _check(self, book: Book, tip: _Tip | None) -> None:
        """Check that it is this population's and includes the tip. Raises `LedgerError`."""
        if book.population != self.population:
            raise LedgerError(
                f"the ledger {self.path} belongs to the population {quoted(book.population)}, not "
                f"{quoted(self.population)}. Give each population its own file, and all runs on its clients the same "
                f"one."
            )
        if tip is not None and (tip[0] != book.id or tip[1:] not in book.tips):
            raise LedgerError(
                f"the ledger {self.path} was cut off, changed or exchanged: its newest line is number "
                f"{book.tip[0]}, but {self.tip_path.name} knows line {quoted(tip[1])}, which is not in it. What was "
                f"spent is therefore unknown. Restore the original ledger."
            )

    def _require_none(self, tip: _Tip | None) -> None:
        if tip is not None:
            raise LedgerError(
                f"the ledger {self.path} is missing or empty, but {self.tip_path.name} knows of it. What was "
                f"spent on {quoted(self.population)} cannot be forgotten: restore the ledger."
            )

    def _outside(self, book: Book) -> Outside:
        return Outside("ledgers", book.id, self.state)

    def _know(self, book: Book, mark: str) -> None:
        self._outside(book).write(self.path, mark=mark, number=book.tip[0], digest=book.tip[1])

    def _strange(self, book: Book, known: Mapping[str, Any] | None) -> str:
        """Why it is not the file recorded outside, in words; "" if it is."""
        if known is None:
            return f"{self._outside(book).path.parent} has no record of it"
        return elsewhere(known, self.path) or (
            "" if known.get("mark") == book.mark else "another copy of it was adopted since"
        )

    def _require_newest(self, book: Book, known: Mapping[str, Any] | None) -> None:
        if known is not None and (known.get("number"), known.get("digest")) not in book.tips:
            raise LedgerError(
                f"the ledger {self.path} is older than what was written: it ends with line {book.tip[0]}, but line "
                f"{quoted(known.get('number'))}, which {self._outside(book).path} knows, is not in it. What was "
                f"released since would be forgotten. Restore the newest one; if that is lost for good, remove that "
                f"file, adopt this one (fedlora privacy {self.path.name} --adopt --because '...'), and charge what is "
                f"missing (--charge)."
            )

    def _require_own(self, book: Book, known: Mapping[str, Any] | None) -> None:
        """Raise `LedgerError` for a copy, and for an older version."""
        if why := self._strange(book, known):
            raise LedgerError(
                f"the ledger {self.path} is a copy, or was moved or restored: {why}. Two copies would spend one budget "
                f"twice. Use the original, with the same user and FEDLORA_STATE_DIR as before. If "
                f"you mean this one, and never use the original again: fedlora privacy {self.path.name} --adopt "
                f"--because 'why it is here now'."
            )
        self._require_newest(book, known)

    def _keep_tip(self, book: Book) -> None:
        self._write_tip(book)
        self._know(book, book.mark)

    def _write_tip(self, book: Book) -> None:
        number, digest = book.tip
        files.write(self.tip_path, chain.line_of({"number": number, "digest": digest, "id": book.id}))
        for path in (self.path, self.tip_path):
            with suppress(PermissionError):  # it is another user's file
                os.utime(path, (TIMELESS + number,) * 2)
