"""Flower's processes on this machine: what they write is for this user only, and they end with who started them.

A child is killed by the kernel when its launcher is gone, also by kill -9; what it started itself, Flower's SuperExec
and ServerApp, looks for it and ends then. Flower detaches its SuperExec from the SuperLink's group
of processes, so a group's end is not the end of all. What belongs to a federation is therefore told by a mark in its
environment, which also finds a ServerApp that a killed `serve` left in a long computation.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import psutil

from fedlora.core.parent import killed_with
from fedlora.flower.ownership import opened_here

SWITCHES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "NO_COLOR": "1",
}
GIVES_BACK = {  # glibc's: what is freed of 256 kB or more goes back to the system at once, however large others were
    "MALLOC_MMAP_THRESHOLD_": "262144",
    "MALLOC_TRIM_THRESHOLD_": "262144",
    "MALLOC_ARENA_MAX": "2",
}
SUPERLINK = "fedlora.flower.serving.superlink_process"
_OF = "FEDLORA_PROCESS_OF"
_LOOPBACK = ("127.0.0.1", "localhost")


def environment(flower_home: Path) -> dict[str, str]:
    """Of Flower's processes: whose they are, no telemetry, no updates, nothing installed, and no proxy for loopback."""
    found = {**os.environ, **SWITCHES, "FLWR_HOME": str(flower_home), _OF: str(flower_home)}
    found["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{found.get('PATH', '')}"
    for name in ("NO_PROXY", "no_proxy"):
        found[name] = ",".join(dict.fromkeys([*filter(None, found.get(name, "").split(",")), *_LOOPBACK]))
    return found


def started(command: Sequence[str], log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A process in a group of its own, its output appended to `log`; whatever it makes is for this user only. It ends
    with the thread that calls this. Raises `OSError` where there is no such program.
    """
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = opened_here(log, os.O_WRONLY | os.O_APPEND)
    with os.fdopen(descriptor, "ab") as file:
        return subprocess.Popen(
            command, env=dict(env), stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            start_new_session=True, umask=0o077, preexec_fn=partial(killed_with, os.getpid()),
        )  # fmt: skip


def end(process: subprocess.Popen[bytes], seconds: float = 8.0) -> None:
    """Ask a process and its group to end; kill what has not after `seconds`."""
    _signal_group(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    _signal_group(process.pid, signal.SIGKILL)
    process.wait()


def started_for(flower_home: Path) -> list[psutil.Process]:
    """All that runs with `environment(flower_home)`, also what an earlier launcher has left."""
    found = psutil.process_iter(["environ"])
    return [one for one in found if (one.info["environ"] or {}).get(_OF) == str(flower_home)]


def end_all(left: Iterable[psutil.Process], seconds: float = 5.0) -> None:
    """Ask processes to end; kill those that have not after `seconds`."""
    for ask in (psutil.Process.terminate, psutil.Process.kill):
        left = list(left)
        for process in left:
            with contextlib.suppress(psutil.Error):
                ask(process)
        _, left = psutil.wait_procs(left, seconds)


def last_words(text: str, lines: int = 1) -> str:
    """The last lines of a log that say something, without the frames that Flower draws."""
    plain = [line.strip("│╭╮╰╯─ \t\r") for line in text.splitlines()]
    said = [line for line in plain if line and line not in ("Error", "Traceback (most recent call last):")]
    return "\n".join(said[-lines:]) if said else "it said nothing"


def tail(path: Path, size: int = 20_000) -> str:
    """The end of a log file, at most `size` bytes; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def trim(log: Path, largest: int = 20_000_000) -> None:
    """A log does not fill the disk: over `largest` bytes, its last quarter goes to .1, and it begins anew."""
    if log.exists() and log.stat().st_size > largest:
        with contextlib.suppress(OSError):  # where the disk is full, all of it goes
            log.with_name(log.name + ".1").write_text(tail(log, largest // 4), encoding="utf-8")
        os.truncate(log, 0)  # it is open for appending, so its writer goes on at the new end


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


__all__ = [
    "GIVES_BACK", "SUPERLINK", "SWITCHES", "end", "end_all", "environment", "last_words", "started", "started_for",
    "tail", "trim",
]  # fmt: skip
