"""What this process is doing, what of it is done and what is left: told by the work, for whoever watches.

Work that a person may have to wait for says so, with `doing("loading the model")` or `stepped(pieces, "testing")`. That
prints nothing. A program with a log runs `beating`, which writes a line whenever the log was silent for a while.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

FIRST = 0.7  # processor seconds without a word until the first line: most of them import libraries
EVERY = 25.0  # seconds of silence before a line
_LOOK = 0.1


@dataclass(eq=False)
class Step:
    """A piece of work under way. of: its size, None if unknown. closed: what happens inside is secret."""

    what: str
    of: int | None = None
    done: int = 0
    closed: bool = False


_under_way: list[Step] = []  # the innermost last
_heard_at = time.monotonic()


@contextmanager
def doing(what: str, of: int | None = None, *, closed: bool = False) -> Iterator[Step]:
    """Say what the block does. The step's `done` and `what` may change meanwhile. Also a decorator."""
    step = Step(what, of, closed=closed)
    _under_way.append(step)
    try:
        yield step
    finally:
        _under_way.remove(step)


def stepped(items: Iterable[T], what: str, of: int | None = None) -> Iterator[T]:
    """The items, each done when the next is asked for. of: their number, if they have no length.

    Example:
        >>> [now() for _ in stepped("ab", "spelling")]
        ['spelling: 0 of 2 done', 'spelling: 1 of 2 done']
    """
    with doing(what, len(items) if isinstance(items, Sized) else of) as step:
        for item in items:
            yield item
            step.done += 1


def now() -> str:
    """What is under way, from the outermost step to the innermost that is no secret; "" if nothing is."""
    words = []
    for step in [*_under_way]:
        words.append(step.what + (f": {step.done} of {step.of} done" if step.of is not None else ""))
        if step.closed:
            break
    return "; ".join(words)


def heard() -> None:
    """The log got a line: its silence begins anew."""
    global _heard_at
    _heard_at = time.monotonic()


@contextmanager
def beating(say: Callable[[str], None], name: str, most: float = 0.0) -> Iterator[None]:
    """While the block runs, `say` a line after FIRST processor seconds, and whenever the log was silent for EVERY
    seconds: `name`, what is under way, and the seconds since the block began. While nothing changes, each pause is
    twice the last one, up to `most` seconds: a server may wait for days."""
    over, began = threading.Event(), time.monotonic()

    def beat() -> None:
        before, pause = "", EVERY
        while not over.wait(_LOOK):
            if (step := now()) != before:
                before, pause = step, EVERY
            silent = time.monotonic() - max(began, _heard_at)
            first = _heard_at < began
            if silent >= pause or (first and time.process_time() >= FIRST):
                what = step or ("importing libraries" if first else "at work")
                say(f"{name}: {what}, {time.monotonic() - began:.0f} s")
                heard()
                pause = max(EVERY, min(2 * pause, most))

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
