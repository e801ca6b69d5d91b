"""Tasks in processes of their own: one that dies costs its task a second try and the other tasks nothing.

Each process is a `ProcessPoolExecutor` of one worker, so that a dead one says whose task it was. Interrupts reach the
parent alone, which ends them; the system ends them when the parent is gone, also in the middle of a task.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

from fedlora.core.parent import end_with

T = TypeVar("T")
R = TypeVar("R")
_TRIES = 2
_LOOK = 0.3  # seconds between two looks at what runs


def run_in_processes(
    function: Callable[[T], R],
    tasks: Sequence[T],
    workers: int,
    *,
    begin: Callable[[], None],
    wanted: Callable[[T], bool],
    watch: Callable[[Sequence[T]], None],
) -> Iterator[tuple[T, R | BaseException]]:
    """(task, function(task)) as they come; in place of the result the exception, where there is one.

    Args:
        begin: called once in each new process.
        wanted: asked before a task is started; one that is not wanted is left out.
        watch: called with the running tasks, every now and then.

    A task whose process died is run again in a new one; when that dies too, its result is a `BrokenProcessPool`.
    """
    waiting = deque(enumerate(tasks))
    deaths: Counter[int] = Counter()
    slots: list[_Slot[R]] = [_Slot(begin) for _ in range(min(workers, len(tasks)))]
    running: dict[Future[R], tuple[int, T, _Slot[R]]] = {}
    try:
        while waiting or running:
            for slot in slots:
                while slot.idle and waiting:
                    number, task = waiting.popleft()
                    if wanted(task):
                        running[slot.start(function, task)] = (number, task, slot)
            done, _ = wait(running, timeout=_LOOK, return_when=FIRST_COMPLETED)
            watch([task for _, task, _ in running.values()])
            for future in done:
                number, task, slot = running.pop(future)
                slot.idle, error = True, future.exception()
                if isinstance(error, BrokenProcessPool):
                    slot.renew()
                    deaths[number] += 1
                    if deaths[number] < _TRIES:
                        waiting.appendleft((number, task))
                        continue
                yield task, error if error is not None else future.result()
    finally:
        _end(slots)


def _end(slots: Sequence[_Slot[Any]]) -> None:
    """All of them, also where an interrupt comes meanwhile: it is raised when none is left. Python's own end would wake
    an executor that is half closed, and print what went wrong there."""
    interrupt: KeyboardInterrupt | None = None
    waiting = list(slots)
    while waiting:
        try:
            waiting[-1].end()
            waiting.pop()
        except KeyboardInterrupt as again:
            interrupt = again
    if interrupt is not None:
        raise interrupt


class _Slot(Generic[R]):
    """A place for one process and its one task."""

    def __init__(self, begin: Callable[[], None]) -> None:
        self._begin = begin
        self._executor = _executor(begin)
        self._process: BaseProcess | None = None
        self.idle = True

    def renew(self) -> None:
        """A new executor; its process starts with its first task."""
        self._executor.shutdown(wait=True)  # its process is dead already
        self._executor, self._process = _executor(self._begin), None

    def start(self, function: Callable[[T], R], task: T) -> Future[R]:
        self.idle = False
        if self._process is not None:
            return self._executor.submit(function, task)
        before = set(multiprocessing.active_children())
        with _interrupts_ignored():  # what a process ignores, those that it starts ignore
            future = self._executor.submit(function, task)
        self._process = next(iter(set(multiprocessing.active_children()) - before), None)
        return future

    def end(self) -> None:
        """At once where a task still runs."""
        if not self.idle and self._process is not None:
            self._process.terminate()
        self._executor.shutdown(wait=True, cancel_futures=True)


def _executor(begin: Callable[[], None]) -> ProcessPoolExecutor:
    spawning = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, spawning, initializer=_started, initargs=(os.getpid(), begin))


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # only that one may say what signals do
        yield
        return
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


def _started(parent: int, begin: Callable[[], None]) -> None:
    """In a new process: it ends when the one that started it does, also in the middle of a task."""
    end_with(parent)  # what was finished is stored, whole
    begin()
