"""Runs in processes of their own, which can be killed. Forked from one that has imported everything."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch

from support.command_line import call

TESTS = Path(__file__).parent.parent


def fork_server() -> Any:
    """A process that has imported everything, and from which others are forked: seconds saved on each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.projects", "support.processes", "fedlora.runs.plots"])
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)  # where it finds this module
        forkserver.ensure_running()
    return context


def command_line(args: Sequence[str], log: str) -> None:
    """`fedlora ARGS` in a process of its own; what it says goes to `log`."""
    with open(log, "a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    call(args)


def started(forked: Any, project: Path, out: Path, sets: Sequence[str]) -> Any:
    args = ["run", str(project / "config.toml"), "--out", str(out), "--resume"]
    args += [a for s in sets for a in ("--set", s)]
    child = forked.Process(target=command_line, args=(args, str(out.parent / "log.txt")), daemon=True)
    child.start()
    return child


def lines_in(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for(child: Any, ready: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while child.is_alive() and not ready():
        assert time.monotonic() < until, "nothing happened"
        time.sleep(0.002)
