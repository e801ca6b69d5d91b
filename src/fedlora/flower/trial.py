"""A federation's folder as running processes on this machine: SuperLink and SuperNodes on loopback, for a trial.

    with Trial(folder) as trial:            started, registered, online
        trial.run(resume=False)             `flwr run`, its log streamed
        trial.kill("site-2")                as a power cut would
    # everything that was started has ended

Processes are ended by their group, and only those that were started here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from fedlora.errors import ConfigError, FedLoRAError
from fedlora.flower.policy import Policy
from fedlora.flower.project import CONNECTION, SWITCHES, connection, superlink_command, supernode_command


class TrialFailed(FedLoRAError, RuntimeError):
    """A process of the trial did not start, or ended; its log's last words are in the message."""


class Trial:
    """The processes of a federation's folder. `start` says what happens, for the screen."""

    def __init__(self, folder: Path, say: Callable[[str], None] = lambda line: None) -> None:
        self.home, self._say = folder.resolve(), say
        if not (self.home / "run.toml").is_file():
            raise ConfigError(f"{folder} is no folder of `fedlora flower init`: it has no run.toml.")
        self.names = list(Policy.read(self.home / "policy.toml").clients)
        self.address, self.insecure = connection(self.home)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._logs = self.home / "logs"
        self._env = {**os.environ, **SWITCHES, "FLWR_HOME": str(self.home / "flwr"), "NO_COLOR": "1"}
        self._env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{self._env.get('PATH', '')}"

    def __enter__(self) -> Trial:
        try:
            self.start_superlink()
            for name in self.names:
                self.start_node(name)
            self.wait_online(len(self.names))
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start_superlink(self) -> None:
        """The SuperLink, and its nodes' keys registered under their names."""
        port = int(self.address.rpartition(":")[2])
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                raise TrialFailed(f"port {port} is in use; `fedlora flower init --port` takes another one.")
        self._start("superlink", superlink_command(self.home, port, insecure=self.insecure))
        self._until("the SuperLink answers", 60, self._answers, "superlink")
        self._say(f"SuperLink at {self.address} ({'no TLS' if self.insecure else 'TLS, node authentication'})")
        if self.insecure:
            return
        register = self.home / "flwr" / "nodes.json"  # the list that `flwr supernode ls` gives knows no names
        known: dict[str, str] = json.loads(register.read_text()) if register.is_file() else {}
        for name in self.names:
            if name not in known:
                key = f"{self.home}/keys/{name}.pub"
                _, words = self._flwr("supernode", "register", key, CONNECTION, "--name", name)
                found = re.search(r"SuperNode (\d+) registered", words)
                if found is None:
                    raise TrialFailed(f"the node {name!r} could not be registered: {_last(words)}")
                known[name] = found[1]
                register.write_text(json.dumps(known))

    def start_node(self, name: str) -> None:
        command = supernode_command(self.home, name, self.address, free_port(), insecure=self.insecure)
        self._start(name, command)
        self._say(f"SuperNode {name}")

    def wait_online(self, count: int, seconds: float = 90) -> None:
        self._until(f"{count} nodes are online", seconds, lambda: len(self.online()) >= count, *self.names)

    def nodes(self) -> list[dict[str, Any]]:
        """The SuperLink's list of nodes: name, status, ..."""
        code, words = self._flwr("supernode", "ls", CONNECTION, "--format", "json", "--verbose")
        found = _json(words) if code == 0 else None
        listed = list(found.get("nodes", [])) if isinstance(found, dict) else []
        register = self.home / "flwr" / "nodes.json"
        names = {i: n for n, i in json.loads(register.read_text()).items()} if register.is_file() else {}
        return [{**node, "name": names.get(node.get("node-id"))} for node in listed if node.get("status") != "deleted"]

    def online(self) -> list[str]:
        return [str(node.get("name") or node.get("node-id")) for node in self.nodes() if node.get("status") == "online"]

    def run(self, *, resume: bool = False, evaluate: bool = False, out: Callable[[str], None] | None = None) -> int:
        """`flwr run` to its end, its log line by line to `out`. Returns the exit code: 0 if the run completed."""
        with self.launch(resume=resume, evaluate=evaluate) as process:
            assert process.stdout is not None
            for line in process.stdout:
                (out or self._say)(line.rstrip())
        return 0 if self.last_status() == "finished:completed" else 1

    def launch(self, *, resume: bool = False, evaluate: bool = False) -> subprocess.Popen[str]:
        """`flwr run` as a process whose log can be read."""
        settings = f"resume={str(resume).lower()} evaluate={str(evaluate).lower()}"
        return subprocess.Popen(
            ["flwr", "run", str(self.home / "app"), CONNECTION, "--stream", "-c", settings],
            env=self._env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def last_status(self) -> str:
        """The newest run's status, as Flower says it: "running", "finished:completed", "finished:failed"."""
        code, words = self._flwr("ls", CONNECTION, "--format", "json")
        found = _json(words) if code == 0 else None
        runs = found.get("runs", []) if isinstance(found, dict) else []
        return str(max(runs, key=lambda run: str(run.get("pending-at", "")))["status"]) if runs else ""

    def kill(self, name: str) -> None:
        """End a process of the trial at once, with everything that it started: "superlink" or a node."""
        process = self._processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        """End everything, nodes first; whatever does not end is killed."""
        for name in sorted(self._processes, key=lambda n: n == "superlink"):
            process = self._processes[name]
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        until = time.monotonic() + 8
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, until - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):  # what it started may be left (flower's orphans)
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._processes.clear()

    # -------------------------------------------------------------------------------------------------------- inside

    def _answers(self) -> bool:
        """Whether the SuperLink does; flwr's exit code is 0 either way."""
        found = _json(self._flwr("ls", CONNECTION, "--format", "json")[1])
        return isinstance(found, dict) and bool(found.get("success"))

    def _start(self, name: str, command: list[str]) -> None:
        self._logs.mkdir(exist_ok=True)
        if shutil.which(command[0], path=self._env["PATH"]) is None:
            raise TrialFailed(f"{command[0]} is not installed: pip install 'fedlora[flower]'.")
        with (self._logs / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _until(self, what: str, seconds: float, true: Callable[[], bool], *needed: str) -> None:
        until = time.monotonic() + seconds
        while not true():
            for name in needed:
                process = self._processes.get(name)
                if process is not None and process.poll() is not None:
                    words = (self._logs / f"{name}.log").read_text(errors="replace")
                    raise TrialFailed(f"{name} ended with code {process.returncode}: {_last(words)}")
            if time.monotonic() > until:
                raise TrialFailed(f"not so within {seconds:.0f} s: {what}. The logs are in {self._logs}.")
            time.sleep(0.5)

    def _flwr(self, *words: str) -> tuple[int, str]:
        done = subprocess.run(["flwr", *words], env=self._env, capture_output=True, text=True, check=False, timeout=60)
        return done.returncode, done.stdout + done.stderr


def free_port() -> int:
    """A port of loopback that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _json(words: str) -> Any:
    """The JSON object in a command's output, whatever is printed around it."""
    begin = words.find("{")
    try:
        return json.JSONDecoder().raw_decode(words[begin:])[0] if begin >= 0 else None
    except ValueError:
        return None


def _last(words: str) -> str:
    lines = [line.strip("│╭╮╰╯─ \t") for line in words.splitlines()]  # flwr's own errors stand in a box
    said = [line for line in lines if line and line != "Error"]
    return said[-1] if said else "it said nothing"
