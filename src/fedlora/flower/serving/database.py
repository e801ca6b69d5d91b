"""The SuperLink's database. Flower keeps all payloads in it, deletes those of finished runs, and reuses their room."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path


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


def forget_unregistered(path: Path, public_key: bytes) -> None:
    """Let a key be registered again: Flower keeps the row of an unregistered node, and accepts each key only once.

    Safe beside a running SuperLink: it is one row in one transaction, for a node that can no longer do anything.
    """
    with contextlib.closing(sqlite3.connect(path, timeout=10)) as database:
        database.execute("DELETE FROM node WHERE public_key = ? AND status = 'unregistered'", (public_key,))
        database.commit()


__all__ = ["forget_unregistered", "private", "size"]
