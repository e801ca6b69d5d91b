"""A process that ends when the one that started it does, however that ends: the kernel sees to it (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_libc = ctypes.CDLL(None)  # loaded here, so that a process just forked has nothing to load


def killed_with(parent: int) -> None:
    """From now on: this process is killed when `parent` ends, also in the middle of a long call. It holds for what this
    process becomes by exec, and not for what it starts.

    Args:
        parent: the process that started this one. More exactly its thread that did so, which must last as long.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel was asked
        os._exit(1)


__all__ = ["killed_with"]
