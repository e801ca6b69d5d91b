"""A process that is killed before one of its steps, played in this process: from then on it does nothing more.

    with dying_at(3) as died:       before its third step on the disk
        write()

A killed process is no power cut: what was written stays.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

Seen = TypeVar("Seen")
STEPS = [
    (os, name)
    for name in ("mkdir", "open", "rename", "replace", "rmdir", "unlink", "chmod", "fchmod", "fsync", "pwrite",
                 "ftruncate", "write")
]  # fmt: skip


class Killed(BaseException):
    """Nothing of what is killed catches it."""


@contextmanager
def dying_at(step: int, calls: Sequence[tuple[Any, str]] = STEPS, *, torn: bool = False) -> Iterator[list[str]]:
    """What it was about to do, if it came so far. step: counted from 1, of `calls` (owner, name). torn: `os.pwrite`
    writes half of its bytes before."""
    seen, died = 0, list[str]()

    def dying(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += 1
            if died or seen == step:  # the dead do nothing more, such as cleaning up
                if torn and not died:
                    real(args[0], args[1][: len(args[1]) // 2], args[2])
                died.append(f"{sys._getframe(1).f_code.co_name}: {name}")
                raise Killed
            return real(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patched, suppress(Killed):
        for owner, name in calls:
            patched.setattr(owner, name, dying(name, getattr(owner, name)))
        yield died


def at_each_step(
    root: Path, write: Callable[[Path], object], look: Callable[[Path], Seen],
    prepare: Callable[[Path], object] = lambda home: None, calls: Sequence[tuple[Any, str]] = STEPS, *,
    torn: bool = False,
) -> list[tuple[Seen, Seen]]:  # fmt: skip
    """For each step of `write`: what `look` sees after a kill before it, and after a second call. The last pair is of
    one that was not killed. Each has a folder of its own below `root`."""
    found = []
    for step in itertools.count(1):
        home = root / f"step-{step}"
        home.mkdir()
        prepare(home)
        with dying_at(step, calls, torn=torn) as died:
            write(home)
        then = look(home)
        write(home)
        found.append((then, look(home)))
        if not died:
            return found
    raise AssertionError
