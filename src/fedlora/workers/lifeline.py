"""An executor whose processes end with their owner, however it ends, and ignore Ctrl-C, which is for the owner.

Each process reads from a pipe into which nothing is ever written. When the pipe's other end is closed, or its owner is
gone, the reader ends at once, whatever it is doing. (The kernel's own signal, `core.parent`, would come too early: when
the owner's thread that started them ends.)
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_met: Any = None  # in a process: where all of them meet
_mine: weakref.WeakSet[Connection] = weakref.WeakSet()  # the ends that this process holds


class Executor:
    """A `ProcessPoolExecutor` of `size` processes, which start with `start` or the first work.

    Args:
        begin: called first in each process, with its number, 0 to size - 1, and `given`; an exception in it kills the
            process.
        server: None for forks of this process, which share its memory until they write to it. They must not use more
            threads than one. Otherwise modules that are slow to import: the processes fork from a clean server
            process, which imports these once (if it is not running yet), and `given` is pickled.
    """

    def __init__(
        self, size: int, begin: Callable[..., None], *given: object, server: Sequence[str] | None = None
    ) -> None:
        context = multiprocessing.get_context("fork" if server is None else "forkserver")
        if server is not None:
            context.set_forkserver_preload([*server])
            forkserver.ensure_running()  # not in `submit`: everything others fork from it would ignore Ctrl-C too
        reader, self._lifeline = context.Pipe(duplex=False)
        _mine.add(self._lifeline)
        self._size = size
        begun = (os.getpid(), reader, context.Value("i", 0), context.Barrier(size), begin, given)
        self._inner = ProcessPoolExecutor(size, context, initializer=_begun, initargs=begun)

    def start(self) -> None:
        """Start all processes, and wait until each has begun.

        Raises:
            BrokenProcessPool, BrokenPipeError: one died before.
        """
        for begun in [self.submit(_meet) for _ in range(self._size)]:
            begun.result()

    def submit(self, work: Callable[..., T], *given: object) -> Future[T]:
        """Like `ProcessPoolExecutor.submit`."""
        with _interrupts_held(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # Python 3.12
            return self._inner.submit(work, *given)

    def end(self, *, at_once: bool) -> None:
        """End the processes, at once or when their work is done. May be called again after an interrupt."""
        for process in [*(self._inner._processes or {}).values()] if at_once else ():
            process.kill()  # also one that is stopped (SIGSTOP), which no other signal ends
        self._inner.shutdown(wait=True, cancel_futures=True)
        self._lifeline.close()


def end_server() -> None:
    """End the process that others fork from, and what it has begun to fork, at once: it may be importing still, and
    would go on, print errors of its forks, and hold this process's output open."""
    server: Any = forkserver._forkserver
    pid = server._forkserver_pid
    if pid is None:
        return
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGSTOP)  # so that it forks no more
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split():
            os.kill(int(child), signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
    server._stop()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Delay Ctrl-C until this block ends. Processes inherit the mask, so those started inside never receive it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begun(
    owner: int, lifeline: Connection, number: Any, met: Any, begin: Callable[..., None], given: tuple[object, ...]
) -> None:
    global _met
    _met = met
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for other in [*_mine]:  # a fork has copies of its owner's ends, and would keep itself alive
        other.close()
    if os.getppid() == owner:  # the owner's streams may be locked by a thread of its that no fork has
        sys.stdout, sys.stderr = (os.fdopen(k, "w", 1, errors="backslashreplace", closefd=False) for k in (1, 2))
    _end_by_signal(lifeline)
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    with number.get_lock():
        mine, number.value = number.value, number.value + 1
    begin(mine, *given)


def _meet() -> None:
    """Work that ends when every process is doing it, so each has begun."""
    _met.wait()


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
