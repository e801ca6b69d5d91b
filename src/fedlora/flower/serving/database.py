"""The SuperLink's database. Flower keeps all payloads in it, deletes those of finished runs, and never shrinks it.

All of this is done while no SuperLink runs, except for one row, which is explained there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

_WORTH = 64_000_000  # bytes that can be freed: less is not worth the time


def private(path: Path) -> None:
    """Make the database and SQLite's files beside it private to this user: they hold payloads and tokens."""
    for place in (path, *(path.with_name(path.name + end) for end in ("-wal", "-shm", "-journal"))):
        with contextlib.suppress(FileNotFoundError):
            if place.stat().st_mode & 0o077:
                os.chmod(place, 0o600)


def size(path: Path) -> int:
    """Bytes of the database and its log; 0 if there is none."""
    places = (path, path.with_name(path.name + "-wal"))
    return sum(place.stat().st_size for place in places if place.is_file())


def shrink(path: Path) -> int:
    """Return the space of deleted rows to the disk. Returns bytes; 0 if there is little, or no room to do it.

    SQLite writes the rest again beside the old file, so it needs that much room. No SuperLink may run.
    """
    if not path.is_file():
        return 0
    before = size(path)
    with contextlib.suppress(sqlite3.Error), _open(path) as database:  # damaged or locked: the SuperLink will report it
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        page, pages, empty = (
            int(database.execute(f"PRAGMA {name}").fetchone()[0])
            for name in ("page_size", "page_count", "freelist_count")
        )
        needed = (pages - empty) * page
        if empty * page >= _WORTH and shutil.disk_usage(path.parent).free > 2 * needed + _WORTH:
            database.execute("VACUUM")
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    private(path)
    return max(0, before - size(path))


def forget_unregistered(path: Path, public_key: bytes) -> None:
    """Let a key be registered again: Flower keeps the row of an unregistered node, and accepts each key only once.

    Safe beside a running SuperLink: it is one row in one transaction, for a node that can no longer do anything.
    """
    with _open(path) as database:
        database.execute("DELETE FROM node WHERE public_key = ? AND status = 'unregistered'", (public_key,))
        database.commit()


@contextlib.contextmanager
def _open(path: Path) -> Iterator[sqlite3.Connection]:
    database = sqlite3.connect(path, timeout=10)
    try:
        yield database
    finally:
        database.close()


__all__ = ["forget_unregistered", "private", "shrink", "size"]
