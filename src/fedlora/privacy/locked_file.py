"""A file that one process at a time reads and appends to, under a lock (flock), at explicit offsets."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedlora.errors import LedgerError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LARGEST = 2**28  # bytes in a ledger; a hundred thousand rounds take a third of it
PATIENCE = 120.0  # seconds to wait for another process; computing epsilon takes one or two


@contextmanager
def held(path: Path) -> Iterator[int]:
    """The file, open and locked, created if missing: other processes and threads wait.

    Raises:
        LedgerError: no such place, no locks, another process holds it too long, or a disk error inside the block.
    """
    if fcntl is None:
        raise LedgerError("a privacy ledger needs file locks (flock), which this system lacks: use Linux.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
    except OSError as error:
        raise LedgerError(f"the ledger {path} cannot be opened: {error.strerror or error}.") from error
    try:
        _lock(path, descriptor)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise LedgerError(f"the ledger {path} is not an ordinary file. Name one, or a new name.")
            if not path.exists() or not os.path.samestat(os.fstat(descriptor), os.stat(path)):
                raise LedgerError(f"the ledger {path} was removed or exchanged meanwhile. Nothing was charged.")
            yield descriptor
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # even if a forked child still has it open
    except OSError as error:
        raise LedgerError(f"the ledger {path} cannot be used: {error.strerror or error}.") from error
    finally:
        os.close(descriptor)


def content(descriptor: int) -> bytes:
    """The whole content of an open file."""
    parts, at = [], 0
    while part := os.pread(descriptor, 2**20, at):
        parts.append(part)
        at += len(part)
    return b"".join(parts)


def put(descriptor: int, raw: bytes, at: int) -> None:
    """Write `raw` at that offset, completely, and flush it."""
    while raw:
        written = os.pwrite(descriptor, raw, at)
        raw, at = raw[written:], at + written
    os.fsync(descriptor)


def _lock(path: Path, descriptor: int) -> None:
    until = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise LedgerError(
                    f"another process has held the ledger {path} for {PATIENCE:g} seconds. Nothing was charged; try "
                    f"again when it has ended."
                ) from None
            time.sleep(0.02)
        except OSError as error:
            raise LedgerError(
                f"the file system of {path} has no locks ({error.strerror}): two runs could spend one budget twice. "
                f"Put the ledger on a local disk."
            ) from error
