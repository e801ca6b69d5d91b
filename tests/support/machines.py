"""Separate machines for tests: network namespaces, each with an address, a name, a folder and processes of its own.

    with Network(tmp_path, ["server", "acme"]) as network:
        server = network["server"]
        server.run("fedlora", "doctor", "fed")                  to its end, in the machine's folder
        server.start("node", "fedlora", "flower", "node", ...)  beside it, its output in a file
        server.link(up=False)                                   the cable is out

The bridge and all links are inside namespaces too: nothing of the host's network is touched, and nothing leaves.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

SERVER_NAME = "fl.example.org"
STAND_INS = Path(__file__).parent / "stand_in_commands"
PROGRAMS = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
LOGS = ("*.said", "*/state/logs/*.log")
_NETNS = Path("/etc/netns")
_NETWORKS = itertools.count()


def free_port() -> int:
    """A port of loopback that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(port: int) -> bool:
    """Whether somebody listens at that port of loopback."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def why_no_namespaces() -> str:
    """What is missing for network namespaces; empty where they are permitted."""
    if shutil.which("ip") is None:
        return "`ip` is not installed (Debian: iproute2)"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return "" if tried.returncode == 0 else f"network namespaces do not work here: {tried.stderr.strip()}"


def machines_needed(*programs: str, machines: bool = True) -> pytest.MarkDecorator:
    """A mark: skipped, with the reason, where a program is missing, or where separate machines are not permitted.

    With FEDLORA_DEPLOYMENT_MUST_RUN set, as CI has it, nothing is skipped: what is missing fails.
    """
    reasons = [f"`{name}` is not installed" for name in programs if shutil.which(name, path=PROGRAMS) is None]
    return unless("; ".join([*reasons, *filter(None, [why_no_namespaces() if machines else ""])]))


def unless(reason: str) -> pytest.MarkDecorator:
    must = bool(os.environ.get("FEDLORA_DEPLOYMENT_MUST_RUN"))
    return pytest.mark.skipif(bool(reason) and not must, reason=reason or "-")


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    """Both streams, in the order in which they came."""


@dataclass
class Machine:
    """One of a network. `folder` is where its commands run."""

    name: str
    address: str
    folder: Path
    namespace: str
    clock: str = ""
    """What faketime takes, such as "+600s"; empty: the right time."""
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def command(self, words: Sequence[str]) -> list[str]:
        # The monotonic clock stays: a machine whose clock is wrong does not wait longer. Not by the program `faketime`,
        # which ends only when all that it has started has ended; $LIB is the linker's word.
        late = ["env", f"FAKETIME={self.clock}", "LD_PRELOAD=/usr/$LIB/faketime/libfaketime.so.1"]
        late = [*late, "FAKETIME_DONT_FAKE_MONOTONIC=1", "DONT_FAKE_MONOTONIC=1"] if self.clock else []
        return ["ip", "netns", "exec", self.namespace, *late, *words]

    @property
    def env(self) -> dict[str, str]:
        """Of its commands: what a page put into /usr/local/bin, what stands in for systemd, and this environment."""
        kept = {k: os.environ[k] for k in ("PYTHONPATH", "LANG", "OMP_NUM_THREADS", "TMPDIR") if k in os.environ}
        programs = [str(self.folder / ".bin"), str(STAND_INS), str(Path(sys.executable).parent), PROGRAMS]
        return {
            "PATH": os.pathsep.join(programs), "HOME": str(self.folder), "PWD": str(self.folder), "COLUMNS": "200",
            "NO_COLOR": "1", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **kept,
        }  # fmt: skip

    def run(self, *words: str, seconds: float = 120) -> Done:
        """A command to its end; one that takes longer than `seconds` is ended."""
        log = self.folder / f".said-{time.monotonic_ns()}"
        with log.open("wb") as file:
            process = subprocess.Popen(
                self.command(words), cwd=self.folder, env=self.env, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                start_new_session=True,
            )  # fmt: skip
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                _killed(process)
        out = log.read_text(errors="replace")
        log.unlink()
        return Done(process.returncode, out)

    def shell(self, script: str, seconds: float = 120) -> Done:
        return self.run("bash", "-euo", "pipefail", "-c", script, seconds=seconds)

    def start(self, called: str, *words: str) -> None:
        """A command that stays; what it says is in `said(called)`."""
        with self.log(called).open("ab") as file:
            self._running[called] = subprocess.Popen(
                self.command(words), cwd=self.folder, env=self.env, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                start_new_session=True,
            )  # fmt: skip

    def log(self, called: str) -> Path:
        return self.folder / f"{called}.said"

    def said(self, called: str) -> str:
        path = self.log(called)
        return path.read_text(errors="replace") if path.exists() else ""

    def end(self, called: str, seconds: float = 20) -> None:
        """End what was started under that name; killed if it stays."""
        process = self._running.pop(called)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        _killed(process)

    def pids(self, word: str = "") -> list[int]:
        """The processes of this machine whose command line has that word."""
        found, here = [], f"net:[{os.stat(f'/run/netns/{self.namespace}').st_ino}]"
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and os.readlink(entry / "ns/net") == here:
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if word in line:
                        found.append(int(entry.name))
        return found

    def kill(self, word: str = "") -> int:
        """Kill -9 what has that word in its command line; nothing said: everything, as a power cut does."""
        killed: set[int] = set()
        for _ in range(1 if word else 20):  # of everything, none may be left that starts something again
            found = self.pids(word)
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed |= set(found)
            if not found:
                break
            time.sleep(0 if word else 0.1)
        if not word:
            for process in self._running.values():
                process.wait()
            self._running.clear()
        return len(killed)

    def link(self, *, up: bool) -> None:
        """Its cable in or out."""
        _ip("-n", self.namespace, "link", "set", "eth0", "up" if up else "down")


class Network:
    """Machines that reach one another at 10.77.0.x, and nobody else; the first is the server, by its name."""

    def __init__(self, root: Path, names: Sequence[str]) -> None:
        self._prefix = f"fl{os.getpid()}n{next(_NETWORKS)}"  # of a process that has several, each its own
        self.machines: dict[str, Machine] = {}
        for k, name in enumerate(names):
            folder = root / name
            folder.mkdir()
            self.machines[name] = Machine(name, f"10.77.0.{k + 11}", folder, f"{self._prefix}-{name}")

    def __getitem__(self, name: str) -> Machine:
        return self.machines[name]

    def __iter__(self) -> Iterator[Machine]:
        return iter(self.machines.values())

    def __enter__(self) -> Network:
        try:
            self._wire()
        except BaseException:
            self._tear_down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for machine in self:
            machine.kill()
        self._tear_down()

    def _wire(self) -> None:
        hub = f"{self._prefix}-hub"
        _ip("netns", "add", hub)
        _ip("-n", hub, "link", "add", "switch", "type", "bridge")
        _ip("-n", hub, "link", "set", "switch", "up")
        hosts = "127.0.0.1 localhost\n" + "".join(f"{m.address} {m.name}\n" for m in self)
        hosts += f"{next(iter(self)).address} {SERVER_NAME}\n"
        for k, machine in enumerate(self):
            space = machine.namespace
            _ip("netns", "add", space)
            (_NETNS / space).mkdir(parents=True)
            (_NETNS / space / "hosts").write_text(hosts)
            (_NETNS / space / "resolv.conf").write_text("")  # no name server: a wrong name fails at once
            _ip("link", "add", "eth0", "netns", space, "type", "veth", "peer", "name", f"port{k}", "netns", hub)
            _ip("-n", hub, "link", "set", f"port{k}", "master", "switch", "up")
            _ip("-n", space, "addr", "add", f"{machine.address}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", space, "link", "set", "eth0", "up")

    def _tear_down(self) -> None:
        for space in [*(m.namespace for m in self), f"{self._prefix}-hub"]:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
            shutil.rmtree(_NETNS / space, ignore_errors=True)
        with contextlib.suppress(OSError):
            _NETNS.rmdir()


def until(true: Callable[[], Any], seconds: float, what: str, *machines: Machine) -> Any:
    """Wait until it is true, and return it; the machines' last words are in the failure."""
    end = time.monotonic() + seconds
    while not (found := true()):
        if time.monotonic() > end:
            logs = [path for m in machines for pattern in LOGS for path in sorted(m.folder.glob(pattern))]
            said = [f"--- {p}\n{p.read_text(errors='replace')[-1500:]}" for p in logs if p.is_file()]
            raise AssertionError("\n".join([f"not within {seconds:.0f} s: {what}", *said]))
        time.sleep(0.3)
    return found


def _killed(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {shlex.join(words)}: {done.stderr.strip()}"
