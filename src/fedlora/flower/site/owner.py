"""Whose trainer this is: the process of the node that it works for, with which it ends."""

from __future__ import annotations

import os
import select
import threading
import time
from pathlib import Path

OWNER = "FEDLORA_NODE_PID"  # set by `fedlora flower node`, for all that its SuperNode starts
_PROGRAMS = (b"flower-supernode", b"flower-superexec")


def owner_of_this() -> int | None:
    """The process that a trainer started by this one works for: the node that is named in the environment; else the
    SuperNode that started this process, however far up, or the SuperExec where that was started by hand."""
    named = os.environ.get(OWNER, "")
    if named.isdecimal() and int(named) > 1 and Path(f"/proc/{named}").exists():
        return int(named)
    found: int | None = None
    pid = os.getppid()
    while pid > 1:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if any(word.endswith(_PROGRAMS) for word in words[:3]):
                found = pid  # the farthest is the SuperNode
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            break
    return found


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
