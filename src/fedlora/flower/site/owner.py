"""Whose trainer this is: the process of the node that it works for, with which it ends. (A ServerApp ends with its
SuperExec so.)"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from pathlib import Path

OWNER = "FEDLORA_NODE_PID"  # set by `fedlora flower node`, for all that its SuperNode starts


def owner_of_this() -> int | None:
    """The process that a trainer started by this one works for, as the environment names it; None for a SuperNode that
    was started by hand: then nobody's work for two minutes is its end."""
    named = os.environ.get(OWNER, "")
    return int(named) if named.isdecimal() and int(named) > 1 and Path(f"/proc/{named}").exists() else None


def end_with(owner: int) -> None:
    """From now on: when that process ends, this one does, whatever it is doing."""
    threading.Thread(target=_wait_for, args=(owner,), daemon=True).start()


def _wait_for(owner: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(owner)], [], [])  # no later process of the same number is taken for it
    os._exit(0)


__all__ = ["OWNER", "end_with", "owner_of_this"]
