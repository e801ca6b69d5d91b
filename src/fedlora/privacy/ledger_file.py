"""The ledger's two files: the lines, and NAME.tip beside them, which holds the newest line's number and digest.

A third one lies elsewhere: what is known of it `outside`.

What is decided, and why:
* A line is appended under a lock (flock) and flushed (fsync of file and folder) before anything may leave for it.
* A last line without its end was never finished: nothing left for it. The next line cuts it off.
* A ledger that was edited, or cut off behind its tip, is refused, and so is a tip without its ledger.
* One file has the mark that is known outside, lies where that says, and holds the newest line that was written. A copy
  or an older one is refused: both would spend the same budget. Written last, before anything may leave for the line:
  a writer that is killed before left nothing, and its line counts.
* No locks in the file system: refused.
* Its time of change says the number of its newest line, not when that was written (`chain`).
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
from fedlora.core.echo import quoted
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
    """Lines of one population's ledger, whole and lasting. path: with links resolved."""

    path: Path
    population: str
    state: Path | None = None  # where what is known outside lies; None: as `outside.state_folder`

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
    def opened(self) -> Iterator[tuple[int, Book]]:
        """The locked file and its book, begun where it is new. Raises `LedgerError`, also for a copy."""
        with held(self.path) as descriptor:
            book, outside = self._begun(descriptor), self._outside
            with outside(book).held():
                tip = self._tip()
                self._check(book, tip)
                self._require_own(book, outside(book).read())
                self._require_tip(book, tip)
                yield descriptor, book

    def read_own(self) -> Book | None:
        """As `read`, of the ledger itself. Raises `LedgerError` also for a copy, and where nothing could be kept."""
        book = self.read()
        if book is None:
            Outside("ledgers", "new", self.state).check_writable()
            return None
        known = self._outside(book).read()
        book = self.read() or book  # after what is known: lines only grow
        self._require_own(book, known)
        return book

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
        self._keep_tip(after)
        return after

    def flush(self, descriptor: int, book: Book) -> None:
        """What another writer may have been killed before."""
        os.fsync(descriptor)
        files.sync_folder(self.path.parent)
        self._keep_tip(book)

    def adopt(self, reason: str) -> None:
        """A line that says that the file is this one from now on. Raises `LedgerError`: none is there, or damaged."""
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
                self._know(book, mark)  # from here on the other one is refused, and this one until it has its line
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
            self._know(begun, begun.mark)  # before the line: a ledger of which nothing is known is a copy
            put(descriptor, header, 0)
            files.sync_folder(self.path.parent)
            book = chain.read(content(descriptor), str(self.path))
            if book is None:
                raise LedgerError(f"the ledger {self.path} cannot be written: the file stays empty.")
        return book

    def _require_tip(self, book: Book, tip: _Tip | None) -> None:
        if tip is None and len(book.tips) == 1:  # begun just now, or its maker was killed before this
            self._write_tip(book)
        elif tip is None:
            raise LedgerError(
                f"{self.tip_path.name} is missing beside the ledger {self.path}, so nobody can see whether it was "
                f"cut off. Move or restore both together; if that file is lost for good, and this is the whole ledger "
                f"(compare its newest line with what cards say): fedlora privacy {self.path.name} --adopt --because "
                f"'what happened to it'."
            )

    def _tip(self) -> _Tip | None:
        """(id, number, digest) in the tip's file; None where there is none."""
        try:
            found = parse_json(read_given(self.tip_path))
            return found["id"], found["number"], found["digest"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            why = getattr(error, "strerror", None) or error
            raise LedgerError(f"{self.tip_path} cannot be read ({why}). Restore it with its ledger.") from error

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
        """Why it is not the one that is known outside, in words; "" where it is."""
        if known is None:
            return f"{self._outside(book).path.parent} has no record of it"
        return elsewhere(known, self.path) or (
            "" if known.get("mark") == book.mark else "another copy of it was adopted since"
        )

    def _require_newest(self, book: Book, known: Mapping[str, Any] | None) -> None:
        if known is not None and (known.get("number"), known.get("digest")) not in book.tips:
            raise LedgerError(
                f"the ledger {self.path} is older than what was written: it ends with line {book.tip[0]}, and line "
                f"{quoted(known.get('number'))}, which {self._outside(book).path} knows, is not in it. What was "
                f"released since would be forgotten. Restore the newest one; if that is lost for good, remove that "
                f"file, adopt this one (fedlora privacy {self.path.name} --adopt --because '...'), and charge what is "
                f"missing (--charge)."
            )

    def _require_own(self, book: Book, known: Mapping[str, Any] | None) -> None:
        """Raises `LedgerError` for a copy, and for an older one."""
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
            with suppress(PermissionError):  # another user's file
                os.utime(path, (TIMELESS + number,) * 2)
