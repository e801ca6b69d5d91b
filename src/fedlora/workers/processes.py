"""Processes that each hold a copy of one object, the resident, and work on it.

On a CPU they are forks of this process: they read its memory, and a page is copied only when one of them writes to it.
So the base model, the data and the libraries are in memory once, and nothing has to pickle or to be imported again.
CUDA does not survive a fork; for a GPU they fork from a server process, and the resident travels by pickle.

Each is a `ProcessPoolExecutor` of one process, so that a death costs the work of that process alone. They end with
this process, however it ends, and leave Ctrl-C to it, but a server that still imports prints its traceback. This module
knows nothing about federation.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from traceback import format_exception
from typing import Any, Generic, Self, TypeVar

import torch
import torch.multiprocessing  # its reductions put tensors passed to a process into shared memory

from fedlora.core.process import ends_with
from fedlora.errors import FedLoRAError, HyperparameterError, WorkerDied

R = TypeVar("R")
T = TypeVar("T")
U = TypeVar("U")


def available(device: str = "cpu") -> int:
    """The number of workers that uses the machine well: GPUs for a "cuda" device, else cores this process may use."""
    if device.startswith("cuda"):
        return max(1, torch.cuda.device_count())
    return len(os.sched_getaffinity(0))


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
        self._resident, self._begin, self._server = resident, begin, server
        self._executors: list[ProcessPoolExecutor] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def map(self, work: Callable[[R, T], U], items: Iterable[T]) -> Iterator[U | WorkerDied]:
        """The results of `work(resident, item)` for each item, in order, which is a `WorkerDied` if its process died.

        Draws at most twice as many items ahead as there are processes. Exceptions in the work are raised here.
        """
        self._start()
        rest, first, drawn = iter(items), 0, 0
        free = [*range(self.size)]
        running: dict[Future[bytes], tuple[int, int]] = {}  # -> number of the item, and of the process
        done: dict[int, Future[bytes]] = {}
        while True:
            for item in islice(rest, min(len(free), first + 2 * self.size - drawn)):
                process = free.pop()
                running[self._submit(process, pickle.dumps((work, item), protocol=5))] = drawn, process
                drawn += 1
            if first in done:
                yield _result(done.pop(first))
                first += 1
            elif running:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    number, process = running.pop(future)
                    free.append(process)
                    done[number] = future
            else:
                return

    def close(self) -> None:
        """End the processes at once. New work starts them again."""
        while self._executors:
            end(self._executors[-1])
            self._executors.pop()

    def _start(self) -> None:
        if self._executors:
            return
        try:
            for number in range(self.size):
                self._executors.append(self._started(number))
            for begun in [executor.submit(os.getpid) for executor in self._executors]:
                begun.result()
        except (BrokenProcessPool, OSError) as error:
            self.close()
            guard = " A script that uses them must work below `if __name__ == '__main__':`." * bool(self._server)
            raise HyperparameterError(
                f"the {self.size} worker processes cannot start, or die at their start; their output is above, if any."
                f"{guard} They need memory, open files, and semaphores in /dev/shm: {error}"
            ) from error

    def _started(self, number: int) -> ProcessPoolExecutor:
        return one_process(_board, number, self._resident, self._begin, server=self._server)

    def _submit(self, process: int, packed: bytes) -> Future[bytes]:
        try:
            return self._executors[process].submit(_do, packed)
        except BrokenProcessPool:  # it has died, in its last work or since
            end(self._executors[process])
            self._executors[process] = self._started(process)
            return self._executors[process].submit(_do, packed)


def one_process(begin: Callable[..., None], *given: object, server: Sequence[str] | None = None) -> ProcessPoolExecutor:
    """An executor of one process, which starts with the first work.

    begin: called first in it, with `given`; an exception there kills the process. server: as in `Processes`.
    """
    context = multiprocessing.get_context("fork" if server is None else "forkserver")
    if server is not None:
        context.set_forkserver_preload([*server])
    return ProcessPoolExecutor(1, context, initializer=_begun, initargs=(server is None, begin, given))


def end(executor: ProcessPoolExecutor) -> None:
    """End an executor's processes at once, whatever they do. May be called again after an interrupt."""
    for process in [*(executor._processes or {}).values()]:
        process.kill()  # also one that is stopped (SIGSTOP), which no other signal ends
    executor.shutdown(wait=True, cancel_futures=True)


def _result(future: Future[bytes]) -> Any:
    try:
        return pickle.loads(future.result())
    except BrokenProcessPool as error:
        return WorkerDied(f"the process that did this work died: out of memory? ({error})")


# --------------------------------------------------------------------------------------------- inside the processes

_resident: Any = None


def _begun(forked: bool, begin: Callable[..., None], given: tuple[object, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    owner = multiprocessing.parent_process()
    assert owner is not None and owner.pid is not None
    ends_with(owner.pid)
    if forked:  # the owner's streams may be locked by a thread of its that no fork has
        sys.stdout, sys.stderr = (os.fdopen(k, "w", 1, errors="backslashreplace", closefd=False) for k in (1, 2))
    begin(*given)


def _board(number: int, resident: Any, begin: Callable[[Any, int], None] | None) -> None:
    global _resident
    gc.freeze()  # a collection would write to, and so copy, every page with an object of the owner's
    torch.set_num_threads(1)
    _resident = resident
    if begin is not None:
        begin(resident, number)


def _do(packed: bytes) -> bytes:
    work, item = pickle.loads(packed)
    try:
        return pickle.dumps(work(_resident, item), protocol=5)
    except Exception as error:
        raise portable(error) from None


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
