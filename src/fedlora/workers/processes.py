"""Processes that each hold a copy of one object, the resident, and work on it; selected tensors are in memory once.

`lifeline.Executor` is the pool itself and leaves nothing running when this process ends, however it ends. This module
adds what it lacks: sharing big tensors, and recovering work whose process died. It knows nothing about federation.
"""

from __future__ import annotations

import contextlib
import io
import logging
import multiprocessing
import os
import pickle
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from traceback import format_exception
from typing import Any, Generic, TypeVar

import torch
import torch.multiprocessing  # its reductions put tensors passed to a process into shared memory
from torch import Tensor

from fedlora.errors import FedLoRAError, HyperparameterError
from fedlora.workers.lifeline import Executor

log = logging.getLogger(__name__)
R = TypeVar("R")
T = TypeVar("T")
U = TypeVar("U")

_SHARED_MEMORY = Path("/dev/shm")
_ALIGNED = 64  # numbers: torch's own alignment, so that kernels behave the same
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
        resident: the object to work on. It must pickle. Each process has its own copy, so work may change it.
        size: number of processes.
        shared: tensors of `resident` that all processes, including this one, share in memory: contiguous, on the CPU.
            Do not write to them.
        threads: torch's, in each process.
        begin: called in each process with its copy and its number, 0 to size - 1, before any work.
        preload: modules that are slow to import: the process from which the others are forked imports them once (if it
            is not running yet).

    Raises:
        HyperparameterError: size or threads below 1, a script that repeats its work when a worker imports it, a
            resident that does not pickle, too little shared memory, or processes that die at their start.

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
        shared: Sequence[Tensor] = (),
        threads: int = 1,
        begin: Callable[[R, int], None] | None = None,
        preload: Sequence[str] = ("fedlora.core.trainer",),
    ) -> None:
        for name, value in (("size", size), ("threads", threads)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise HyperparameterError(f"Processes: {name} must be a whole number >= 1; got {value!r}.")
        if getattr(multiprocessing.current_process(), "_inheriting", False):  # multiprocessing's own check
            raise HyperparameterError(
                "a worker process imports the script that started it, so the script does its work again. Put its work "
                "below `if __name__ == '__main__':`."
            )
        self.size = size
        self._shared = list(shared)
        _share(self._shared)
        self._packed = _pickled((resident, begin), self._shared)
        self._threads = threads
        self._preload = [*preload, __name__]
        self._executor: Executor | None = None
        self._proved = False  # whether any work has come back

    def __enter__(self) -> Processes[R]:
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
            self._proved = True
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
        if self._executor is None:
            self._executor = self._started()
        try:
            task.future = self._executor.submit(_do, task.packed)
        except BrokenPipeError as error:  # a process ended before receiving its work
            if not self._proved:
                raise self._dead_at_start(error) from error
            raise BrokenProcessPool("a process ended as it started") from error

    def _started(self) -> Executor:
        try:
            number = multiprocessing.get_context("forkserver").Value("i", 0)
            return Executor(self.size, self._preload, _begin, self._packed, self._shared, self._threads, number)
        except OSError as error:  # semaphores use shared memory too
            free = f", of which {_SHARED_MEMORY} has {shutil.disk_usage(_SHARED_MEMORY).free / 1e6:.3g} MB left"
            raise HyperparameterError(
                f"{self.size} worker processes cannot be started: {error}. They need shared memory"
                f"{free if _SHARED_MEMORY.is_dir() else ''}, and open files. Raise these limits, or use one worker."
            ) from error

    def _recover(self, tasks: deque[_Task], broken: BrokenProcessPool) -> Died | None:
        """Restart after a death, and requeue the unfinished work. Returns `Died` for the first task if it has killed
        its process alone."""
        first = tasks[0]
        alone = any(task.breaks >= _PATIENCE for task in tasks)  # then `_draw` submits nothing: this was the only one
        first.alone += alone
        self.close(at_once=True)
        if first.alone >= _PATIENCE and not self._proved:
            raise self._dead_at_start(broken)
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
        return HyperparameterError(
            f"the {self.size} worker processes die at their start; their output is above, if there is any. A script "
            f"that uses them must do its work below `if __name__ == '__main__':`, since they import it, and what they "
            f"hold must be importable by name. Is there memory for {self.size} of them? {why}"
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


# -------------------------------------------------------------------------------------------------------- pickling


class _Pickler(pickle.Pickler):
    """Pickles shared tensors as their numbers."""

    def __init__(self, file: io.BytesIO, shared: Sequence[Tensor]) -> None:
        super().__init__(file, protocol=5)
        self._number = {_place(tensor): k for k, tensor in enumerate(shared)}

    def persistent_id(self, value: Any) -> int | None:
        return self._number.get(_place(value)) if type(value) is Tensor else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, number: Any) -> Tensor:
        tensor: Tensor = self._shared[number]
        return tensor


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """A tensor's memory: equal for two objects that view the same numbers in the same memory."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return (id(tensor),)
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _pickled(value: Any, shared: Sequence[Tensor]) -> bytes:
    file = io.BytesIO()
    try:
        _Pickler(file, shared).dump(value)
    except Exception as error:  # the object's own code may raise anything
        raise HyperparameterError(
            f"a {type(value[0]).__name__} cannot travel to worker processes: it does not pickle: {error} The usual "
            f"cause is a function or class defined inside another function: move it to the top of a module."
        ) from error
    return file.getvalue()


def _share(tensors: Sequence[Tensor]) -> None:
    """Move tensors into shared memory, in place: one block per dtype, since every block costs an open file."""
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise HyperparameterError(
                f"a tensor of shape {tuple(tensor.shape)} cannot be shared: it is not contiguous, or not on the CPU. "
                f"Leave it out of `shared`; each process then has its own copy."
            )
    by_place = sorted({_place(tensor): tensor for tensor in tensors}.items(), key=lambda item: item[0][0])
    for ((first, *_), tensor), ((second, *_), _) in pairwise(by_place):
        if first + tensor.numel() * tensor.element_size() > second:
            raise HyperparameterError(
                "two tensors to share overlap in memory, like views of one tensor, and would come apart. Leave both "
                "out of `shared`; each process then has its own copy."
            )
    moving: dict[torch.dtype, dict[tuple[Any, ...], list[Tensor]]] = {}
    for tensor in tensors:
        if not tensor.is_shared():  # type: ignore[no-untyped-call]
            moving.setdefault(tensor.dtype, {}).setdefault(_place(tensor), []).append(tensor)
    _check_room(sum(same[0].numel() * same[0].element_size() for places in moving.values() for same in places.values()))
    for dtype, places in moving.items():
        sizes = [-(-same[0].numel() // _ALIGNED) * _ALIGNED for same in places.values()]
        whole, start = torch.empty(sum(sizes), dtype=dtype).share_memory_(), 0  # type: ignore[no-untyped-call]
        for same, size in zip(places.values(), sizes, strict=True):
            inside = whole[start : start + same[0].numel()].view(same[0].shape)
            inside.copy_(same[0].detach())
            for tensor in same:
                tensor.data = inside
            start += size


def _check_room(needed: int) -> None:
    """Raise `HyperparameterError` if shared memory is too small: writing beyond its end kills a process silently."""
    free = shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else needed
    if needed > free:
        raise HyperparameterError(
            f"the model's weights take {needed / 1e6:.3g} MB of shared memory, but {_SHARED_MEMORY} has "
            f"{free / 1e6:.3g} MB left. In a container raise it (docker run --shm-size=...), or use one worker."
        )


# --------------------------------------------------------------------------------------------- inside the processes

_resident: Any = None
_failed: Exception | None = None


def _begin(packed: bytes, shared: list[Tensor], threads: int, number: Any) -> None:
    """A process's start. Errors are reported with the first work, since an initialiser that raises would only kill."""
    global _resident, _failed
    with number.get_lock():
        mine, number.value = number.value, number.value + 1
    try:
        torch.set_num_threads(threads)
        _resident, begin = _Unpickler(io.BytesIO(packed), shared).load()
        if begin is not None:
            begin(_resident, mine)
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
