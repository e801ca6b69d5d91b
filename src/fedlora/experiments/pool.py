"""Tasks in slots: a process each, or a task of a cluster. If one dies, its task gets a second try, others lose nothing.

Each process is an executor of its own (`workers.processes.one_process`), so that a dead one identifies its task. Only
the parent gets interrupts and ends the processes; they also end with it, even in the middle of a task.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Protocol, TypeVar

from fedlora.workers.processes import end, one_process

log = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")
_TRIES = 2
_IMPORTED = ("fedlora.runs.execution", "fedlora.runs.preparation", "peft")  # once, for all processes
LOOK = 0.3  # seconds between two checks of the running tasks
_OVER = (-1, None)


class Slot(Protocol):
    """A place for one task at a time: a process of this machine, or a task of a cluster."""

    idle: bool

    def start(self, function: Callable[[T], R], task: T) -> Future[R]: ...

    def end(self) -> None:
        """End what runs there, at once."""


def run_in_slots(
    function: Callable[[T], R],
    tasks: Iterator[T | None],
    slots: Sequence[Slot],
    *,
    watch: Callable[[Sequence[T]], None],
) -> Generator[tuple[T, R | BaseException], None, None]:
    """(task, function(task)) as they come; an exception takes the place of the result.

    Args:
        tasks: a None among them means that none can be started at the moment.
        watch: called with the running tasks every now and then, with none while no task can be started.

    A task whose process died runs again in a new one; if that dies too, its result is a `BrokenProcessPool`.
    """
    fresh = enumerate(tasks)
    again: list[tuple[int, T]] = []
    deaths: Counter[int] = Counter()
    running: dict[Future[R], tuple[int, T, Slot]] = {}
    try:
        while True:
            number = 0
            for slot in slots:
                if not slot.idle:
                    continue
                number, task = again.pop() if again else next(fresh, _OVER)
                if task is None:
                    break
                running[slot.start(function, task)] = (number, task, slot)
            if not running and number == _OVER[0]:
                return
            if running:
                done = wait(running, LOOK, FIRST_COMPLETED).done
            else:
                done = set()
                time.sleep(LOOK)
            watch([task for _, task, _ in running.values()])
            for future in done:
                number, task, slot = running.pop(future)
                slot.idle, error = True, future.exception()
                if isinstance(error, BrokenProcessPool):
                    slot.end()
                    deaths[number] += 1
                    if deaths[number] < _TRIES:
                        log.warning("a worker process died; another one takes up its work again")
                        again.append((number, task))
                        continue
                yield task, error if error is not None else future.result()
    finally:
        _end(slots)


def _end(slots: Sequence[Slot]) -> None:
    """End all of them, even if an interrupt comes meanwhile; it is raised at the end. Python's own end would wake a
    half-closed executor, and print its errors."""
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


class Process:
    """A slot for one process and its one task. The process starts with its first task.

    Args:
        begin: called once in each new process.
    """

    def __init__(self, begin: Callable[[], None]) -> None:
        self._begin = begin
        self._executor: ProcessPoolExecutor | None = None
        self.idle = True

    def start(self, function: Callable[[T], R], task: T) -> Future[R]:
        self.idle = False
        if self._executor is None:
            self._executor = one_process(self._begin, server=_IMPORTED)
        return self._executor.submit(function, task)

    def end(self) -> None:
        """End the process, also in the middle of a task. The next task starts a new one."""
        if self._executor is not None:
            end(self._executor)
        self._executor = None
