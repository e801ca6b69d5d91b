"""What stands beside a target while it is written, and what becomes of it when its writer dies.

    .NAME.0123456789ab.part        NAME: the target's, cut where it would be too long for the file system

Its writer holds a lock (flock) on it, which the system lets go of however the writer ends. So what a crash left is told
from another process's work: its lock can be had. Where a file system has no locks nothing is told, and nothing touched.
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
_building: set[str] = set()  # folders that this process is building: what lies in them nobody sees yet


def fresh(folder: Path, name: str) -> Path:
    """A new place in `folder` for what will be its entry `name`."""
    return folder / f"{_begin(folder, name)}{secrets.token_hex(_TOKEN // 2)}{SUFFIX}"


def leftovers(folder: Path, name: str) -> list[Path]:
    """What stands in `folder` for its entry `name`: of the dead, of the living, and nobody's who took such a name."""
    begin, found = _begin(folder, name), re.compile(rf"[0-9a-f]{{{_TOKEN}}}{re.escape(SUFFIX)}")
    with suppress(OSError), os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.name.startswith(begin)]
        return [folder / other for other in sorted(names) if found.fullmatch(other.removeprefix(begin))]
    return []


def hold(descriptor: int) -> bool | None:
    """Take the lock of an open file: False where another one has it, None where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        return False if error.errno in (errno.EACCES, errno.EAGAIN) else None
    return os.fstat(descriptor).st_nlink > 0  # removed between its opening and its lock: whoever did it had the lock


def own(path: Path, kind: int) -> bool:
    """Whether `path` is of that kind (`stat.S_IFREG`, `stat.S_IFDIR`), no link, and of this user."""
    try:
        facts = path.lstat()
    except OSError:
        return False
    return stat.S_IFMT(facts.st_mode) == kind and facts.st_uid == os.geteuid()


@contextmanager
def unseen(folder: Path) -> Iterator[None]:
    """What is written below `folder` meanwhile need not be flushed one by one: it is, as a whole, before it is seen."""
    _building.add(str(folder))
    try:
        yield
    finally:
        _building.discard(str(folder))


def is_unseen(path: Path) -> bool:
    """Whether `path`, an absolute one, lies in a folder that this process is building."""
    return bool(_building) and any(str(parent) in _building for parent in path.parents)


def sync_folder(folder: Path) -> None:
    """Makes a folder's entries last: a rename is only safe from a power cut once the folder itself is on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that has no such thing
            raise
    finally:
        os.close(descriptor)


def _begin(folder: Path, name: str) -> str:
    """How all places for `name` begin. A long name is cut, and the digest of all of it stands for the rest."""
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
