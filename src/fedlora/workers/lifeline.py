"""Processes that end with the one that started them, however that ends, and that hear of no Ctrl-C: it is for the one
who asked for their work.

    reader, lifeline = context.Pipe(duplex=False)      here; nothing is ever written into it
    with interrupts_held():
        ... a process is started that calls `held_by(reader)` first
    lifeline.close()                                   it is gone at once, whatever it does
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Ctrl-C waits until this is over. What processes are started with, they keep: none of them ever hears of it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def held_by(lifeline: Connection) -> None:
    """This process ends when the other end of the pipe is closed, or the process that has it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_by_signal(lifeline)
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()


def _end_with(lifeline: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv_bytes()
    os._exit(1)


def _end_by_signal(lifeline: Connection) -> None:
    """The kernel ends this process with the pipe (SIGIO's usual effect), even while a long call keeps every thread
    from running. Where it cannot, there is the thread."""
    with contextlib.suppress(OSError):
        mine = os.open(f"/proc/self/fd/{lifeline.fileno()}", os.O_RDONLY | os.O_NONBLOCK)  # a description of its own
        fcntl.fcntl(mine, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(mine, fcntl.F_SETFL, fcntl.fcntl(mine, fcntl.F_GETFL) | os.O_ASYNC)
