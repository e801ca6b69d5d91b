"""Ties a process's life to its parent's: the kernel kills it when the parent ends, in whatever way (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal

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


__all__ = ["killed_with"]
