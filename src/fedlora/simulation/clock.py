"""Measures seconds by phase: how long a round trained, aggregated, and so on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

X = TypeVar("X")


class Clock:
    """Seconds by phase. A phase inside another pauses the outer one, so that they add up to the elapsed time."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._began = 0.0

    def _turn(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) + now - self._began
        self._began = now

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._turn()
        self._open.append(phase)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def over(self, phase: str, items: Iterator[X]) -> Iterator[X]:
        """The items, timing how long each takes to arrive."""
        end = object()
        while True:
            with self(phase):
                item = next(items, end)
            if item is end:
                return
            yield item  # type: ignore[misc]
