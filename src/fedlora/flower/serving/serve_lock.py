"""One `fedlora flower serve` or `up` for a folder: a lock that the system lets go of, however its holder ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedlora.core import beside
from fedlora.flower.ownership import holder_said, locked


@contextmanager
def serving(path: Path) -> Iterator[None]:
    """Hold the lock at `path`, FED/state/serve.lock, with this process's id in it.

    Raises:
        ConfigError: another process holds it; its id is named.
    """
    path.parent.mkdir(mode=0o700, exist_ok=True)
    folder = path.parents[1]
    with locked(path, lambda who: (
        f"{folder} is served already, by process {who}: two at once would play each round twice. Look with `fedlora "
        f"flower status {folder}`; end the other one first."
    )):  # fmt: skip
        yield


def holder(path: Path) -> int | None:
    """The id of the process that holds the lock; None where nobody does."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        said = holder_said(descriptor)
        return int(said) if beside.hold(descriptor) is False and said.isdigit() else None
    finally:
        os.close(descriptor)


__all__ = ["holder", "serving"]
