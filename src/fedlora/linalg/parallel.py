"""Processes several matrices at a time, with the same bits for any number of threads.

Each thread has one BLAS thread. On a busy machine, small products can be a hundred times slower on several BLAS threads
than on one; large products gain as much from running side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol, TypeVar, runtime_checkable

import torch

X = TypeVar("X")
Y = TypeVar("Y")


@runtime_checkable
class Each(Protocol):
    """Applies a function to each item, in order or in parallel; the results come in the items' order."""

    def __call__(self, work: Callable[[X], Y], items: Sequence[X], /) -> list[Y]: ...


def one_by_one(work: Callable[[X], Y], items: Sequence[X], /) -> list[Y]:
    """The plain `Each`."""
    return [work(item) for item in items]


@contextmanager
def workers(count: int | None) -> Iterator[Each]:
    """An `Each` with `count` threads; None: as many as torch has."""
    count = count or torch.get_num_threads()
    if count == torch.get_num_threads() == 1:
        yield one_by_one
        return
    before = torch.get_num_threads()
    with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:

        def at_once(work: Callable[[X], Y], items: Sequence[X], /) -> list[Y]:
            return list(pool.map(work, items))

        try:
            yield at_once
        finally:  # torch gives new threads the number that any thread set last
            pool.submit(torch.set_num_threads, before).result()
