"""An executor whose processes end with the one that started them, however that ends, and hear of no Ctrl-C: it is for
the one who asked for their work.

Each process reads from a pipe into which nothing is ever written; when its other end is closed, or the process that has
it is gone, the reader is gone at once, whatever it does. (The kernel's own signal, `core.parent`, would be of no use
here: these processes are forked by multiprocessing's server process, and hold that one open.)
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
    """A `ProcessPoolExecutor` of so many processes, which start with the first work.

    Args:
        preload: modules that take long to import: they are imported once, by the process that the others are forked
            from (where these are the first). Forked from a clean process, others start fast, and the code is in memory
            once; a fork of this process itself would copy its threads' locks.
        begin: called first in each process, with `given`; what it raises kills.
    """

    def __init__(self, size: int, preload: Sequence[str], begin: Callable[..., None], *given: object) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*preload])
        forkserver.ensure_running()  # not in `submit`: all that others fork from it would hear of no Ctrl-C, too
        reader, self._lifeline = context.Pipe(duplex=False)
        self._inner = ProcessPoolExecutor(size, context, initializer=_begun, initargs=(reader, begin, given))

    def submit(self, work: Callable[..., T], *given: object) -> Future[T]:
        """As `ProcessPoolExecutor.submit`."""
        with _interrupts_held():
            return self._inner.submit(work, *given)

    def end(self, *, at_once: bool) -> None:
        """End the processes, at once or when their work is done. It may be called again where an interrupt came."""
        if at_once:
            self._lifeline.close()
        self._inner.shutdown(wait=True, cancel_futures=True)
        self._lifeline.close()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C waits until this is over. What processes are started with, they keep: none of them ever hears of it."""
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
    """The kernel ends this process with the pipe (SIGIO's usual effect), even while a long call keeps every thread
    from running. Where it cannot, there is the thread."""
    with contextlib.suppress(OSError):
        mine = os.open(f"/proc/self/fd/{lifeline.fileno()}", os.O_RDONLY | os.O_NONBLOCK)  # a description of its own
        fcntl.fcntl(mine, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(mine, fcntl.F_SETFL, fcntl.fcntl(mine, fcntl.F_GETFL) | os.O_ASYNC)
