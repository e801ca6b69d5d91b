"""Whose trainer this is: the process of the node that it works for, with which it ends."""

from __future__ import annotations

import os
import select
import threading
import time
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
    try:
        descriptor = os.pidfd_open(owner)  # no later process of the same number is taken for it
    except ProcessLookupError:
        os._exit(0)
    except (AttributeError, OSError):
        while _runs(owner):
            time.sleep(1.0)
        os._exit(0)
    select.select([descriptor], [], [])
    os._exit(0)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


__all__ = ["OWNER", "end_with", "owner_of_this"]
