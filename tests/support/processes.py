"""Runs in processes of their own, which can be killed: forked from pytest's, which has imported all that they need.

Started by Python anew each would import that again, five seconds.
"""

from __future__ import annotations

import importlib
import logging
import os
import posix
import runpy
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from support.command_line import call


def as_python_begins(out: Path, err: Path) -> None:
    """Takes back what pytest and conftest.py changed; from now on, whatever this process says goes to these files."""
    for descriptor, path in ((1, out), (2, err)):
        with path.open("ab") as file:
            os.dup2(file.fileno(), descriptor)
    sys.stdout, sys.stderr = (os.fdopen(k, "w", 1, "utf-8", closefd=False) for k in (1, 2))
    sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
    importlib.reload(warnings)  # pytest gathers them, and makes errors of them
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    for handler in filter(None, (known() for known in logging._handlerList)):  # libraries' own, on pytest's stderr
        if type(handler) is logging.StreamHandler:
            handler.stream = sys.stderr  # setStream flushes the old one first, which pytest may have closed
            handler.flush = sys.stderr.flush  # type: ignore[method-assign]  # as transformers sets it
    os.fsync = posix.fsync
    torch.set_num_threads(1)


def command_line(args: Sequence[str], log: str) -> None:
    """`fedlora ARGS` in a process of its own; what it says goes to `log`."""
    as_python_begins(Path(log), Path(log))
    call(args)


def script(path: Path, args: Sequence[str], said: Path) -> None:
    """`python PATH ARGS` in a process of its own."""
    as_python_begins(said / "out", said / "err")
    sys.argv = [str(path), *args]
    runpy.run_path(str(path), run_name="__main__")


@dataclass(frozen=True)
class Program:
    """A process at work. said: the folder of what it says."""

    process: Any
    said: Path

    def ended(self, seconds: float = 600.0) -> subprocess.CompletedProcess[str]:
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"it did not end in {seconds} s"
        out, err = ((self.said / name).read_text(encoding="utf-8") for name in ("out", "err"))
        return subprocess.CompletedProcess([], self.process.exitcode, out, err)


def begun(forked: Any, target: Callable[..., None], *args: object) -> Any:
    """A process at work. target: of this module, `script` or `command_line`."""
    process = forked.Process(target=target, args=args, daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns where threads run: xdist has one, which waits
        process.start()
    return process


def started(forked: Any, project: Path, out: Path, sets: Sequence[str]) -> Any:
    args = ["run", str(project / "config.toml"), "--out", str(out), "--resume"]
    args += [a for s in sets for a in ("--set", s)]
    return begun(forked, command_line, args, str(out.parent / "log.txt"))


def lines_in(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for(child: Any, ready: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while child.is_alive() and not ready():
        assert time.monotonic() < until, "nothing happened"
        time.sleep(0.002)
