"""Flower's processes on this machine, and who has a folder: a process's files are only for this user, it ends with the
process that started it, and a lock ends with its holder.

The kernel kills a child when its launcher is gone, even after kill -9; the child's own children, Flower's SuperExec
and ServerApp, check for that and end. Flower detaches its SuperExec from the SuperLink's process group, so ending the
group does not end everything. A mark in the environment therefore identifies a federation's processes; it also finds a
ServerApp that a killed `serve` left in a long computation.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from fedlora.core import files
from fedlora.core.process import killed_with
from fedlora.core.text import shown
from fedlora.errors import ConfigError

log = logging.getLogger(__name__)

SWITCHES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "NO_COLOR": "1",
}
# glibc's: what is freed of 256 kB or more goes back to the system at once, however large others were. It costs
# processor time; docs/explanation/scale.md has the figures of both.
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144", "MALLOC_ARENA_MAX": "2"}
SUPERLINK = "fedlora.flower.server.superlink_process"
OF = "FEDLORA_PROCESSOF"
OWNER = "FEDLORA_NODE_PID"  # set by `fedlora flower node`, for all that its SuperNode starts: ClientApps end with it
_LOOPBACK = ("127.0.0.1", "localhost")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def environment(flower_home: Path) -> dict[str, str]:
    """The environment of Flower's processes: the mark, no telemetry, no updates, no installs, no proxy for loopback."""
    found = {**os.environ, **SWITCHES, "FLWR_HOME": str(flower_home), OF: str(flower_home)}
    found["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{found.get('PATH', '')}"
    for name in ("NO_PROXY", "no_proxy"):
        found[name] = ",".join(dict.fromkeys([*filter(None, found.get(name, "").split(",")), *_LOOPBACK]))
    return found


def started(command: Sequence[str], log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process in its own group, with its output appended to `log`; its files are only for this user. It ends
    with the calling thread. Raises `OSError` if there is no such program.
    """
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with log.open("ab") as file:
        return subprocess.Popen(
            command, env=dict(env), stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            start_new_session=True, umask=0o077, preexec_fn=partial(killed_with, os.getpid()),
        )  # fmt: skip


def end_all_of(flower_home: Path, seconds: float = 5.0) -> None:
    """Kill all processes with `environment(flower_home)`, including those that an earlier launcher left. After
    `seconds`, leave what still remains."""
    mark, until = os.fsencode(f"{OF}={flower_home}"), time.monotonic() + seconds
    while (left := _marked(mark)) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _marked(mark: bytes) -> list[int]:
    found = []
    for place in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if mark in place.read_bytes().split(b"\0") and int(place.parent.name) != os.getpid():
                found.append(int(place.parent.name))
    return found


def last_line(path: Path) -> str:
    """The last meaningful line of a log, without the frames and colours that Flower draws."""
    plain = [line.strip("│╭╮╰╯─ \t\r") for line in _COLOUR.sub("", tail(path)).splitlines()]
    lines = [line for line in plain if line and line not in ("Error", "Traceback (most recent call last):")]
    return lines[-1] if lines else "it said nothing"


def tail(path: Path, size: int = 20_000) -> str:
    """The end of a log file, at most `size` bytes; empty if there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


@contextlib.contextmanager
def locked(path: Path, held: str) -> Iterator[None]:
    """Hold the lock at `path`, with this process's id in it; the lock ends with the process.

    Args:
        held: what the process that has it does, in words.

    Raises:
        ConfigError: another process has it; the message has its id. OSError: it cannot be made.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        taken = files.hold(descriptor)
        if taken is False:
            raise ConfigError(f"process {_holder_in(descriptor)} already {held}. One is enough: end it first.")
        if taken is None:
            log.warning("%s: this file system has no locks; make sure that nobody else does the same here", path)
        with contextlib.suppress(OSError):  # on a full disk the id is missing, but the lock holds
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def holder(path: Path) -> int | None:
    """The id of the process that holds a lock; None if nobody does."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        process = _holder_in(descriptor)
        return int(process) if files.hold(descriptor) is False and process.isdigit() else None
    finally:
        os.close(descriptor)


def _holder_in(descriptor: int) -> str:
    """The id that a lock's holder wrote into it, in words."""
    return shown(os.pread(descriptor, 32, 0).decode("ascii", errors="replace").strip() or "unknown")
