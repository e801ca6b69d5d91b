"""The end of a process: with its parent, by the kernel (Linux), or with its whole group, by whoever started it;
of what has left the group, by a mark in its environment (Linux).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_libc = ctypes.CDLL(None)  # at import, so that a freshly forked process loads nothing


def killed_with(parent: int) -> None:
    """From now on the kernel kills this process when `parent` ends, even in the middle of a long call. This survives
    exec, but does not extend to child processes.

    Args:
        parent: the process that started this one; strictly the thread that did, which must live as long.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before prctl took effect
        os._exit(1)


def end(process: subprocess.Popen[bytes], seconds: float = 8.0) -> None:
    """Ask a process and its group to end; after `seconds`, kill what remains."""
    _signal_group(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    _signal_group(process.pid, signal.SIGKILL)
    process.wait()


def end_marked(mark: str, seconds: float = 2.0) -> None:
    """Kill every other process with `mark`, as "NAME=value", in the environment that it was started with, whatever its
    group or session. A mark that no other work has identifies a program's children: they inherit it, unless they are
    given another environment. After `seconds`, leave what still remains.
    """
    until = time.monotonic() + seconds
    while (left := _marked(mark)) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _marked(mark: str) -> list[int]:
    found = []
    for place in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if os.fsencode(mark) in place.read_bytes().split(b"\0") and int(place.parent.name) != os.getpid():
                found.append(int(place.parent.name))
    return found


def how_ended(code: int) -> str:
    """How a process ended, from its `returncode`.

    Example:
        >>> how_ended(3), how_ended(-15)
        ('with code 3', 'by SIGTERM')
    """
    if code >= 0:
        return f"with code {code}"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
    return f"by {name}" + (" (was memory short? journalctl -k says so)" if name == "SIGKILL" else "")


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


__all__ = ["end", "end_marked", "how_ended", "killed_with"]
