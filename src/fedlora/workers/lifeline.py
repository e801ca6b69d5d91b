"""An executor whose processes end with their owner, however it ends, and ignore Ctrl-C, which is for the owner.

Each process reads from a pipe into which nothing is ever written. When the pipe's other end is closed, or its owner is
gone, the reader ends at once, whatever it is doing. (The kernel's own signal, `core.parent`, would not help here: these
processes are forked by multiprocessing's server process, and keep it alive.)
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import TypeVar

T = TypeVar("T")


class Executor:
    """A `ProcessPoolExecutor` of `size` processes, which start with the first work.

    Args:
        preload: modules that are slow to import: the process from which the others are forked imports them once (if it
            is not running yet). Forked from a clean process, the others start fast and share the code in memory; a fork
            of this process would copy its threads' locks.
        begin: called first in each process, with `given`; an exception in it kills the process.
    """

    def __init__(self, size: int, preload: Sequence[str], begin: Callable[..., None], *given: object) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*preload])
        forkserver.ensure_running()  # not in `submit`: everything others fork from it would ignore Ctrl-C too
        reader, self._lifeline = context.Pipe(duplex=False)
        self._inner = ProcessPoolExecutor(size, context, initializer=_begun, initargs=(reader, begin, given))

    def submit(self, work: Callable[..., T], *given: object) -> Future[T]:
        """Like `ProcessPoolExecutor.submit`."""
        with _interrupts_held():
            return self._inner.submit(work, *given)

    def end(self, *, at_once: bool) -> None:
        """End the processes, at once or when their work is done. May be called again after an interrupt."""
        if at_once:
            self._lifeline.close()
        self._inner.shutdown(wait=True, cancel_futures=True)
        self._lifeline.close()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Delay Ctrl-C until this block ends. Processes inherit the mask, so those started inside never receive it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begun(lifeline: Connection, begin: Callable[..., None], given: tuple[object, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_by_signal(lifeline)
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    begin(*given)


def _end_with(lifeline: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv_bytes()
    os._exit(1)


def _end_by_signal(lifeline: Connection) -> None:
    """Let the kernel end this process with the pipe (SIGIO's default effect), even while a long call blocks every
    thread. If that is impossible, the thread does it."""
    with contextlib.suppress(OSError):
        mine = os.open(f"/proc/self/fd/{lifeline.fileno()}", os.O_RDONLY | os.O_NONBLOCK)  # its own file description
        fcntl.fcntl(mine, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(mine, fcntl.F_SETFL, fcntl.fcntl(mine, fcntl.F_GETFL) | os.O_ASYNC)
