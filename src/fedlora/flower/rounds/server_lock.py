"""One ServerApp at a time plays the rounds of a federation: two would write one checkpoint folder by turns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedlora.flower.ownership import locked


@contextmanager
def held(server: Path) -> Iterator[None]:
    """Nobody else plays the rounds in `server` (FED/server) meanwhile.

    Raises:
        ConfigError: another process has it, and which. OSError: it cannot be made.
    """
    server.mkdir(parents=True, exist_ok=True)
    with locked(server / ".lock", lambda who: (
        f"the rounds in {server} are being played by process {who}. Two runs of one federation would undo each other: "
        f"wait for that one, or end it (`fedlora flower status` shows how far it is)."
    )):  # fmt: skip
        yield


__all__ = ["held"]
