"""Atomic file writing: write beside the target, flush, rename, flush the folder.

For whole folders, see `folders`.
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
    """The whole content of an ordinary file, opened by `opened`."""
    with opened(path) as file:
        return file.read()


def digest(path: Path) -> str:
    """SHA-256 of an ordinary file, as 64 hexadecimal digits."""
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that becomes `path` if the block succeeds; otherwise `path` stays as it was and nothing is left.

    Creates the folder if it is missing. After a crash at any moment the old or the new file is there, whole; the next
    write to `path` removes what the crash left beside it. A link at `path` is replaced by the file, and its target is
    not touched.

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
                    os.replace(place, path)  # while we hold the lock: otherwise another process could sweep it
            except BaseException:
                with suppress(OSError):
                    place.unlink(missing_ok=True)
                raise
            if lasting:
                sync_folder(path.parent)
    except OSError as error:
        if error.errno and str(error.filename) in ("None", str(place)):
            raise OSError(error.errno, error.strerror, str(given)) from error  # the temporary name helps nobody
        raise


@contextmanager
def making(folder: Path) -> Iterator[None]:
    """Create the folder and its parents; if the block fails, remove those created here."""
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
    """Replace `path` by `content`, as `replacing` does; text is written as UTF-8."""
    raw = content.encode() if isinstance(content, str) else content
    with replacing(path) as file:
        file.write(raw)


def sweep(path: Path) -> None:
    """Remove what crashed processes left beside `path`. Files that live processes are writing stay."""
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
    """A new file beside `path`, and its descriptor. O_EXCL: never opens a file or link that already exists."""
    for _ in range(beside.TRIES):
        place = beside.fresh(path.parent, path.name)
        with suppress(FileExistsError):
            descriptor = os.open(place, os.O_RDWR | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o666)
            if beside.hold(descriptor) is not False:
                return place, descriptor
            os.close(descriptor)  # another process swept it before we locked it
    raise FileExistsError(errno.EEXIST, "its place for an unfinished file is taken", str(path))
