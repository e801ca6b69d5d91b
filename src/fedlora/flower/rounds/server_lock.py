"""One ServerApp at a time plays the rounds of a federation: two would write one checkpoint folder by turns."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from fedlora.core import beside
from fedlora.core.echo import shown
from fedlora.errors import ConfigError
from fedlora.flower.ownership import opened_here

log = logging.getLogger(__name__)


@contextmanager
def held(server: Path) -> Iterator[None]:
    """Nobody else plays the rounds in `server` (FED/server) meanwhile. The system lets go of it when this process ends,
    however it does.

    Raises:
        ConfigError: another process has it, and which; or it cannot be made.
    """
    path = server / ".lock"
    try:
        server.mkdir(parents=True, exist_ok=True)
        descriptor = opened_here(path, os.O_RDWR)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be made: {error.strerror}; this run would not be safe from others."
        ) from error
    try:
        taken = beside.hold(descriptor)
        if taken is False:
            who = shown(os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process")
            raise ConfigError(
                f"the rounds in {server} are being played by {who}. Two runs of one federation would undo each other: "
                f"wait for that one, or end it (`fedlora flower status` shows how far it is)."
            )
        if taken is None:
            log.warning("%s: this file system has no locks; make sure that nobody else plays these rounds.", server)
        os.ftruncate(descriptor, 0)
        since = datetime.now(UTC).isoformat(timespec="seconds")
        os.pwrite(descriptor, f"process {os.getpid()}, since {since}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


__all__ = ["held"]
