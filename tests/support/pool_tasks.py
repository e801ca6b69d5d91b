"""Tasks for processes of their own, some of which kill theirs. Here a new process finds them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def nothing() -> None:
    """How a process begins that has nothing to prepare."""


def square(x: int) -> int:
    if x < 0:
        raise ValueError(f"{x} is below zero")
    return x * x


def die_so_often(task: tuple[Path, int]) -> str:
    """Kills its process, without a word, as many times as the task says; then comes back."""
    path, times = task
    died = len(path.read_text()) if path.exists() else 0
    path.write_text("x" * (died + 1))
    if died < times:
        os.kill(os.getpid(), signal.SIGKILL)
    return path.name


def visible_gpus(seconds: float) -> str:
    """What CUDA would read, after so many seconds, in which the other process begins."""
    time.sleep(seconds)
    return os.environ["CUDA_VISIBLE_DEVICES"]


def sleep_long(path: Path) -> None:
    """Leaves its process id, and stays."""
    path.with_suffix(".part").write_text(str(os.getpid()))
    path.with_suffix(".part").rename(path)
    time.sleep(600)


def lives(process: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(") ", 1)[1][0]
    except FileNotFoundError:
        return False
    return state != "Z"
