"""The end of a process: with its parent, by the kernel (Linux); with any other process, by a thread that watches it; or
with its whole group, by whoever started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import threading

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


def ends_with(owner: int) -> None:
    """From now on a thread ends this process when the process `owner` ends. Unlike `killed_with`, whatever becomes of
    the thread that started it; but not in the middle of a call that gives no other thread a turn."""
    threading.Thread(target=_end_after, args=(owner,), daemon=True).start()


def _end_after(owner: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(owner)], [], [])  # a later process with the same number is not mistaken for it
    os._exit(1)


def end(process: subprocess.Popen[bytes], seconds: float = 8.0) -> None:
    """Ask a process and its group to end; after `seconds`, kill what remains."""
    _signal_group(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    _signal_group(process.pid, signal.SIGKILL)
    process.wait()


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
