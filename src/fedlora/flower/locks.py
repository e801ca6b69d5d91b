"""The process that has a folder now: two servers at once would undo each other's work. A lock ends with its holder."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from fedlora.core import files
from fedlora.core.text import shown
from fedlora.errors import ConfigError

log = logging.getLogger(__name__)


@contextlib.contextmanager
def locked(path: Path, refused: Callable[[str], str]) -> Iterator[int]:
    """Hold the lock at `path`, with this process's id in it; the lock ends with the process. Yields its descriptor.

    Args:
        refused: makes the message if another process has it, from its id.

    Raises:
        ConfigError: another process has it. OSError: it cannot be made.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        taken = files.hold(descriptor)
        if taken is False:
            raise ConfigError(refused(_holder_said(descriptor)))
        if taken is None:
            log.warning("%s: this file system has no locks; make sure that nobody else does the same here", path)
        with contextlib.suppress(OSError):  # on a full disk the id is missing, but the lock holds
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def serving(path: Path) -> Iterator[None]:
    """Allow one `fedlora flower serve` or `up` per folder: hold the lock at `path`, FED/state/serve.lock.

    Raises:
        ConfigError: another process holds it; the message has its id.
    """
    path.parent.mkdir(mode=0o700, exist_ok=True)
    folder = path.parents[1]
    with locked(path, lambda who: (
        f"process {who} already serves {folder}: two processes would run each round twice. Look with `fedlora flower "
        f"status {folder}`; end the other process first."
    )):  # fmt: skip
        yield


def holder(path: Path) -> int | None:
    """The id of the process that holds a lock; None if nobody does."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        said = _holder_said(descriptor)
        return int(said) if files.hold(descriptor) is False and said.isdigit() else None
    finally:
        os.close(descriptor)


def _holder_said(descriptor: int) -> str:
    """The id that a lock's holder wrote into it, in words."""
    return shown(os.pread(descriptor, 32, 0).decode("ascii", errors="replace").strip() or "unknown")


__all__ = ["holder", "locked", "serving"]
