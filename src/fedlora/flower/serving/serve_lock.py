"""One `fedlora flower serve` or `up` for a folder: a lock that the system lets go of, however its holder ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedlora.core import beside
from fedlora.errors import ConfigError
from fedlora.flower.ownership import opened_here


@contextmanager
def serving(path: Path) -> Iterator[None]:
    """Hold the lock at `path`, FED/state/serve.lock, with this process's id in it.

    Raises:
        ConfigError: another process holds it; its id is named.
    """
    path.parent.mkdir(mode=0o700, exist_ok=True)
    descriptor = opened_here(path, os.O_RDWR)
    try:
        if beside.hold(descriptor) is False:
            raise ConfigError(
                f"{path.parents[1]} is served already, by process {_said(descriptor)}: two at once would play each "
                f"round twice. Look with `fedlora flower status {path.parents[1]}`; end the other one first."
            )
        with suppress(OSError):  # a full disk: it is held all the same
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def holder(path: Path) -> int | None:
    """The id of the process that holds the lock; None where nobody does."""
    try:
        descriptor = os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
    except FileNotFoundError:
        return None
    try:
        said = _said(descriptor)
        return int(said) if beside.hold(descriptor) is False and said.isdigit() else None
    finally:
        os.close(descriptor)


def _said(descriptor: int) -> str:
    return os.pread(descriptor, 32, 0).decode("ascii", errors="replace").strip() or "unknown"


__all__ = ["holder", "serving"]
