"""Temporary files and folders beside a target while it is written, and their removal after the writer dies.

    .NAME.0123456789ab.part        NAME: the target's, shortened if it would be too long for the file system

The writer holds a lock (flock) on it; the kernel releases the lock however the writer ends. A leftover is recognised by
its free lock. On file systems without locks nothing is recognised as a leftover, and nothing is removed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SUFFIX = ".part"
TRIES = 100
_TOKEN = 12  # hexadecimal digits
_building: set[str] = set()  # folders that this process is building; no other process reads their contents yet


def fresh(folder: Path, name: str) -> Path:
    """A new temporary path in `folder` for its entry `name`."""
    return folder / f"{_begin(folder, name)}{secrets.token_hex(_TOKEN // 2)}{SUFFIX}"


def leftovers(folder: Path, name: str) -> list[Path]:
    """Temporary paths in `folder` for its entry `name`: from dead writers, live ones, or anyone using such a name."""
    begin, found = _begin(folder, name), re.compile(rf"[0-9a-f]{{{_TOKEN}}}{re.escape(SUFFIX)}")
    with suppress(OSError), os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.name.startswith(begin)]
        return [folder / other for other in sorted(names) if found.fullmatch(other.removeprefix(begin))]
    return []


def hold(descriptor: int) -> bool | None:
    """Lock an open file: False if another process holds the lock, None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        return False if error.errno in (errno.EACCES, errno.EAGAIN) else None
    return os.fstat(descriptor).st_nlink > 0  # 0: the lock's previous holder removed the file before we locked it


def own(path: Path, kind: int) -> bool:
    """Whether `path` has that kind (`stat.S_IFREG`, `stat.S_IFDIR`), is no link, and belongs to this user."""
    try:
        facts = path.lstat()
    except OSError:
        return False
    return stat.S_IFMT(facts.st_mode) == kind and facts.st_uid == os.geteuid()


@contextmanager
def unseen(folder: Path) -> Iterator[None]:
    """Skip flushing files written below `folder` one by one; the caller flushes it as a whole before publishing it."""
    _building.add(str(folder))
    try:
        yield
    finally:
        _building.discard(str(folder))


def is_unseen(path: Path) -> bool:
    """Whether the absolute `path` lies in a folder that this process is building."""
    return bool(_building) and any(str(parent) in _building for parent in path.parents)


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


def _begin(folder: Path, name: str) -> str:
    """The prefix of all temporary paths for `name`. A long name is shortened and completed with its digest."""
    try:
        most = os.pathconf(folder, "PC_NAME_MAX")
    except (OSError, ValueError):
        most = 255
    room = most - len(f"..{SUFFIX}") - _TOKEN
    raw = os.fsencode(name)
    if len(raw) <= room:
        return f".{name}."
    digest = hashlib.sha256(raw).hexdigest()[:16]
    return f".{raw[: max(room - 17, 0)].decode('utf-8', 'ignore')}~{digest}."
