"""Processes that each hold a copy of one object, the resident, and work on it.

On a CPU they are forks of this process: they read its memory, and a page is copied only when one of them writes to it.
So the base model, the data and the libraries are in memory once, and nothing has to pickle or to be imported again.
CUDA does not survive a fork; for a GPU they fork from a server process, and the resident travels by pickle.

`lifeline.Executor` is the pool itself and leaves nothing running when this process ends, however it ends. This module
adds what it lacks: recovering work whose process died. It knows nothing about federation.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from traceback import format_exception
from typing import Any, Generic, Self, TypeVar

import torch
import torch.multiprocessing  # its reductions put tensors passed to a process into shared memory

from fedlora.errors import FedLoRAError, HyperparameterError
from fedlora.workers.lifeline import Executor

log = logging.getLogger(__name__)
R = TypeVar("R")
T = TypeVar("T")
U = TypeVar("U")

_PATIENCE = 2  # how often work may be under way when processes die before it is tried alone, and then alone


def available(device: str = "cpu") -> int:
    """The number of workers that uses the machine well: GPUs for a "cuda" device, else cores this process may use."""
    if device.startswith("cuda"):
        return max(1, torch.cuda.device_count())
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Died:
    """Work without a result: its process died again and again, at last while it was the only work."""

    reason: str


class Processes(Generic[R]):
    """`size` processes, each with a copy of `resident`. They start with the first work; close them, or use `with`.

    Args:
        resident: the object to work on. Each process has its own copy, so work may change it. Work, items and results
            travel by pickle.
        size: number of processes. Each has one thread: a fork cannot use the threads that its owner's libraries had.
        begin: called in each process with its copy and its number, 0 to size - 1, before any work.
        server: fork from a server process instead, which has imported these modules (if it is not running yet), and
            pickle the resident: for work on GPUs. Its tensors on the CPU are then in shared memory, one for all
            processes, so `begin` must move or copy those that work writes to.

    Raises:
        HyperparameterError: size below 1, or processes that cannot start or die at their start.

    Example:
        >>> import operator
        >>> with Processes(["a", "b", "c"], 2) as processes:
        ...     list(processes.map(operator.getitem, [2, 0]))
        ['c', 'a']
    """

    def __init__(
        self,
        resident: R,
        size: int,
        *,
        begin: Callable[[R, int], None] | None = None,
        server: Sequence[str] | None = None,
    ) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise HyperparameterError(f"Processes: size must be a whole number >= 1; got {size!r}.")
        self.size = size
        self._given = resident, begin
        self._server = server
        self._executor: Executor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(at_once=kind is not None)

    def map(self, work: Callable[[R, T], U], items: Iterable[T]) -> Iterator[U | Died]:
        """The results of `work(resident, item)` for each item, in order; it must be a function of its arguments.

        Draws a few items more than there are processes ahead. Exceptions in the work are raised here. If a process
        dies, all are restarted and the unfinished work is repeated; work that kills its process every time is `Died`.
        """
        rest = iter(items)
        tasks: deque[_Task] = deque()
        self._draw(rest, work, tasks)
        while tasks:
            task = tasks[0]
            try:
                if task.future is None:
                    self._submit(task)
                assert task.future is not None
                outcome = pickle.loads(task.future.result())
            except BrokenProcessPool as broken:
                dead = self._recover(tasks, broken)
                if dead is not None:
                    tasks.popleft()
                    yield dead
                self._draw(rest, work, tasks)
                continue
            tasks.popleft()
            if isinstance(outcome, _Raised):
                raise outcome.error
            self._draw(rest, work, tasks)
            yield outcome

    def close(self, *, at_once: bool = False) -> None:
        """End the processes, when their work is done or at once. New work starts them again."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.end(at_once=at_once)

    def _draw(self, rest: Iterator[T], work: Callable[[R, T], U], tasks: deque[_Task]) -> None:
        """Keep every process busy, with a little work queued; but while some work is suspected of killing, leave `map`
        to run one task at a time."""
        while len(tasks) < 2 * self.size:
            for item in rest:
                tasks.append(_Task(pickle.dumps((work, item), protocol=5)))
                break
            else:
                break
        if any(task.breaks >= _PATIENCE for task in tasks):
            return
        with contextlib.suppress(BrokenProcessPool):  # `map` notices it at the first task
            for task in tasks:
                if task.future is None:
                    self._submit(task)

    def _submit(self, task: _Task) -> None:
        task.future = (self._executor or self._start()).submit(_do, task.packed)

    def _start(self, *, again: bool = False) -> Executor:
        """Processes that have all begun, so it is the work that kills one later. If one dies before, all get a second
        try."""
        try:
            self._executor = Executor(self.size, _begin, *self._given, server=self._server)
            self._executor.start()
            return self._executor
        except (BrokenProcessPool, BrokenPipeError) as error:
            self.close(at_once=True)
            if again:
                raise self._dead_at_start(error) from error
            return self._start(again=True)
        except OSError as error:
            raise HyperparameterError(
                f"{self.size} worker processes cannot be started: {error}. They need memory, open files, and "
                f"semaphores in /dev/shm. Raise these limits, or use one worker."
            ) from error

    def _recover(self, tasks: deque[_Task], broken: BrokenProcessPool) -> Died | None:
        """Restart after a death, and requeue the unfinished work. Returns `Died` for the first task if it has killed
        its process alone."""
        first = tasks[0]
        alone = any(task.breaks >= _PATIENCE for task in tasks)  # then `_draw` submits nothing: this was the only one
        first.alone += alone
        self.close(at_once=True)
        if first.alone >= _PATIENCE:
            return Died(
                f"the process that did this work died {first.breaks + 1} times, at last while working alone: out of "
                f"memory? ({broken})"
            )
        unfinished = 0
        for task in tasks:
            if task.future is None or task.future.cancelled() or not task.future.done() or task.future.exception():
                task.future, task.breaks = None, task.breaks + 1
                unfinished += 1
        log.warning("a worker process died; %d pieces of work are done again", unfinished)
        return None

    def _dead_at_start(self, why: Exception) -> HyperparameterError:
        guard = " A script that uses them must work below `if __name__ == '__main__':`." * (self._server is not None)
        return HyperparameterError(
            f"the {self.size} worker processes die at their start; their output is above, if there is any.{guard} "
            f"Is there memory for {self.size} of them? {why}"
        )


@dataclass(eq=False)
class _Task:
    """Submitted work. breaks: how often processes died while it was under way; alone: while it was the only work."""

    packed: bytes
    future: Future[bytes] | None = None
    breaks: int = 0
    alone: int = 0


@dataclass(frozen=True)
class _Raised:
    """An exception raised by work, on its way back."""

    error: Exception


# --------------------------------------------------------------------------------------------- inside the processes

_resident: Any = None
_failed: Exception | None = None


def _begin(number: int, resident: Any, begin: Callable[[Any, int], None] | None) -> None:
    """A process's start. Errors are reported with the first work, since an initialiser that raises would only kill."""
    global _resident, _failed
    gc.freeze()  # a collection would write to, and so copy, every page with an object of the owner's
    torch.set_num_threads(1)
    _resident = resident
    try:
        if begin is not None:
            begin(resident, number)
    except Exception as error:
        _failed = error


def _do(packed: bytes) -> bytes:
    try:
        if _failed is not None:
            raise HyperparameterError(f"a worker process could not start: {type(_failed).__name__}: {_failed}")
        work, item = pickle.loads(packed)
        return pickle.dumps(work(_resident, item), protocol=5)
    except Exception as error:
        return pickle.dumps(_Raised(portable(error)), protocol=5)


def portable(error: Exception) -> Exception:
    """The error in a form that can travel between processes, with its traceback as a note."""
    where = "".join(format_exception(error))
    try:
        error = pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    if not isinstance(error, FedLoRAError):
        error.add_note(f"in a worker process:\n{where}")
    return error
