"""Writing a file that is all or nothing: beside the place, flushed, renamed, and the folder flushed too.

Whole folders: `folders`.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from fedlora.core import beside
from fedlora.core.beside import sync_folder
from fedlora.given_files import opened

__all__ = ["digest", "making", "opened", "read", "replacing", "sweep", "sync_folder", "write"]

_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC


def read(path: Path) -> bytes:
    """All of an ordinary file, as `opened` opens it."""
    with opened(path) as file:
        return file.read()


def digest(path: Path) -> str:
    """SHA-256 of an ordinary file, in 64 hexadecimal digits."""
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that becomes `path` when the block ends well; else `path` stays as it was and nothing is left.

    The folder is made where it is missing. After a crash at any moment there is the old file or the new one, whole;
    what the crash left beside it goes when `path` is written next. A link at `path` is replaced by the file, and what
    it leads to is not touched.

    Raises:
        OSError: the disk refuses. The old file is untouched.
    """
    given, path = path, path.absolute()
    lasting = not beside.is_unseen(path)
    place: Path | None = None
    try:
        with making(path.parent):
            if lasting:
                sweep(path)
            place, descriptor = _made(path)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    with suppress(FileNotFoundError):
                        old = path.lstat().st_mode
                        if stat.S_ISREG(old):
                            os.fchmod(descriptor, old & 0o777)
                    yield file
                    file.flush()
                    if lasting:
                        os.fsync(descriptor)
                    os.replace(place, path)  # with the lock still held: else another one could take it for a leftover
            except BaseException:
                with suppress(OSError):
                    place.unlink(missing_ok=True)
                raise
            if lasting:
                sync_folder(path.parent)
    except OSError as error:
        if error.errno and str(error.filename) in ("None", str(place)):
            raise OSError(error.errno, error.strerror, str(given)) from error  # the other name tells nobody anything
        raise


@contextmanager
def making(folder: Path) -> Iterator[None]:
    """The folder and those above it are there; where the block fails, those that were made for it go again."""
    missing = []
    for place in (folder, *folder.parents):
        if os.path.lexists(place):
            break
        missing.append(place)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for place in missing:
            with suppress(OSError):  # not empty: another process wrote there
                place.rmdir()
        raise


def write(path: Path, content: str | bytes) -> None:
    """`content` as the whole of `path`, as `replacing` does; text in UTF-8."""
    raw = content.encode() if isinstance(content, str) else content
    with replacing(path) as file:
        file.write(raw)


def sweep(path: Path) -> None:
    """Remove what crashed processes left beside `path`. What a living one is writing stays."""
    for left in beside.leftovers(path.parent, path.name):
        if not beside.own(left, stat.S_IFREG):
            continue
        with suppress(OSError):
            descriptor = os.open(left, os.O_RDWR | _NO_LINK)
            try:
                if beside.hold(descriptor):
                    left.unlink(missing_ok=True)
            finally:
                os.close(descriptor)


def _made(path: Path) -> tuple[Path, int]:
    """A new file beside `path`, and its descriptor. Opened for itself alone: no file and no link that stands there."""
    for _ in range(beside.TRIES):
        place = beside.fresh(path.parent, path.name)
        with suppress(FileExistsError):
            descriptor = os.open(place, os.O_RDWR | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o666)
            if beside.hold(descriptor) is not False:
                return place, descriptor
            os.close(descriptor)  # another process swept it before it was locked
    raise FileExistsError(errno.EEXIST, "its place for an unfinished file is taken", str(path))
