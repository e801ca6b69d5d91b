"""A trainer's owner: the node's process that it works for, with which it ends. (A ServerApp ends with its SuperExec in
the same way.)"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from pathlib import Path

OWNER = "FEDLORA_NODE_PID"  # set by `fedlora flower node`, for all that its SuperNode starts


def owner_of_this() -> int | None:
    """The process for which a trainer started by this one works, from the environment; None if the SuperNode was
    started by hand: then two idle minutes end the trainer."""
    named = os.environ.get(OWNER, "")
    return int(named) if named.isdecimal() and int(named) > 1 and Path(f"/proc/{named}").exists() else None


def end_with(owner: int) -> None:
    """From now on, end this process when that process ends, whatever it is doing."""
    threading.Thread(target=_wait_for, args=(owner,), daemon=True).start()


def _wait_for(owner: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(owner)], [], [])  # a later process with the same number is not mistaken for it
    os._exit(0)


__all__ = ["OWNER", "end_with", "owner_of_this"]
