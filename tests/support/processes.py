"""Runs in processes of their own, which can be killed; fork_server.py forks them."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from support.command_line import call


def said_to(out: Path, err: Path) -> None:
    """From now on, whatever this process says goes to these files."""
    for descriptor, path in ((1, out), (2, err)):
        with path.open("ab") as file:
            os.dup2(file.fileno(), descriptor)


def command_line(args: Sequence[str], log: str) -> None:
    """`fedlora ARGS` in a process of its own; what it says goes to `log`."""
    said_to(Path(log), Path(log))
    torch.set_num_threads(1)
    call(args)


def script(path: Path, args: Sequence[str], said: Path, environment: Mapping[str, str]) -> None:
    """`python PATH ARGS` in a process of its own. Forked, it would have the environment of when the server began."""
    said_to(said / "out", said / "err")
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
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


def begun(forked: Any, said: Path, target: Callable[..., None], *args: object) -> Program:
    """target: of this module, `script` or `command_line`."""
    process = forked.Process(target=target, args=args, daemon=True)
    process.start()
    return Program(process, said)


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
