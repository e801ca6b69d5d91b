"""Writing a file so that it is there whole or not at all: write it beside its place, flush, rename, flush the folder.

    .NAME.0123456789ab.part        what is being written; after a kill it stays, and nothing reads it

For whole folders, see `folders`.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from fedlora.given_files import opened

__all__ = ["digest", "hold", "leftovers", "opened", "read", "replacing", "sweep", "sync_folder", "unfinished", "write"]

_UNFINISHED = re.compile(r"\..+\.[0-9a-f]{12}\.part", re.DOTALL)


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
    """A file to write that becomes `path` if the block succeeds; otherwise `path` stays as it was.

    Creates the folder if it is missing, and keeps an old file's permissions. After a kill at any moment the old or the
    new file is there, whole. A link at `path` is replaced by the file, and its target is not touched.

    Raises:
        OSError: the disk refuses. The old file is untouched.
    """
    path = path.absolute()  # the current directory may change meanwhile
    path.parent.mkdir(parents=True, exist_ok=True)
    place = unfinished(path)
    try:
        with open(place, "xb") as file:
            if path.is_file() and not path.is_symlink():
                shutil.copymode(path, place)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(place, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:  # a full disk names no file
            error.filename = str(path)
        with suppress(OSError):
            place.unlink()
        raise
    sync_folder(path.parent)


def write(path: Path, content: str | bytes) -> None:
    """Replace `path` by `content`, as `replacing` does; text is written as UTF-8."""
    raw = content.encode() if isinstance(content, str) else content
    with replacing(path) as file:
        file.write(raw)


def unfinished(path: Path) -> Path:
    """A new name beside `path` for what will become it."""
    return path.with_name(f".{path.name[:50]}.{secrets.token_hex(6)}.part")  # 50 letters have at most 200 of 255 bytes


def leftovers(folder: Path) -> list[Path]:
    """What writers that were killed left in a folder, and what living ones are writing there."""
    return [path for path in folder.glob(".*.part") if _UNFINISHED.fullmatch(path.name)]


def sweep(folder: Path) -> None:
    """Remove half-written files from a folder to which nobody else writes now."""
    for left in leftovers(folder):
        if left.is_file():
            left.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries: a rename survives a power cut only once the folder itself is on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # the file system cannot sync folders
            raise
    finally:
        os.close(descriptor)


def hold(descriptor: int) -> bool | None:
    """Lock an open file until it is closed: False if another process holds the lock, None if the file system has no
    locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EACCES, errno.EAGAIN) else None
    return True
