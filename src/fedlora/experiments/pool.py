"""Tasks in separate processes: if one dies, its task gets a second try and the others lose nothing.

Each process is an `Executor` with one worker, so that a dead one identifies its task and costs no other's hours: after
a death among `workers.Processes`, which share their work, all unfinished work is done again. Only the parent gets
interrupts and ends the processes; they also end with it, even in the middle of a task (`workers.lifeline`).
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Generic, TypeVar

from fedlora.workers.lifeline import Executor

log = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")
_TRIES = 2
_IMPORTED = ("fedlora.runs.execution", "fedlora.runs.preparation", "peft")  # once, for all processes
_LOOK = 0.3  # seconds between two checks of the running tasks


def run_in_processes(
    function: Callable[[T], R],
    tasks: Sequence[T],
    workers: int,
    *,
    begin: Callable[[], None],
    wanted: Callable[[T], bool],
    watch: Callable[[Sequence[T]], None],
) -> Iterator[tuple[T, R | BaseException]]:
    """(task, function(task)) as they come; an exception takes the place of the result.

    Args:
        begin: called once in each new process.
        wanted: called before a task is started; False leaves the task out.
        watch: called with the running tasks every now and then.

    A task whose process died runs again in a new one; if that dies too, its result is a `BrokenProcessPool`.
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
                    slot.end()
                    deaths[number] += 1
                    if deaths[number] < _TRIES:
                        log.warning("a worker process died; another one takes up its work again")
                        waiting.appendleft((number, task))
                        continue
                yield task, error if error is not None else future.result()
    finally:
        _end(slots)


def _end(slots: Sequence[_Slot[Any]]) -> None:
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


class _Slot(Generic[R]):
    """A slot for one process and its one task. The process starts with its first task."""

    def __init__(self, begin: Callable[[], None]) -> None:
        self._begin = begin
        self._executor: Executor | None = None
        self.idle = True

    def start(self, function: Callable[[T], R], task: T) -> Future[R]:
        self.idle = False
        if self._executor is None:
            self._executor = Executor(1, _begin, self._begin, server=_IMPORTED)
        return self._executor.submit(function, task)

    def end(self) -> None:
        """End the process, at once if a task still runs. The next task starts a new one."""
        if self._executor is not None:
            self._executor.end(at_once=not self.idle)  # finished work is stored completely
        self._executor = None


def _begin(number: int, begin: Callable[[], None]) -> None:
    begin()
