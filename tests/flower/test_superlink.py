"""The SuperLink's folder, database and processes, without a SuperLink. Kind: *unit*. With one: test_deployment.py."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

pytest.importorskip("flwr")


from fedlora.errors import ConfigError
from fedlora.flower import processes
from fedlora.flower.server import superlink
from fedlora.flower.server.superlink import NodeFacts, SuperLink, forget_unregistered, public_key
from fedlora.flower.terms import certificates
from support.marked import started_for
from support.small_apps import settings_with_port


def home(path: Path, port: int = 1) -> Path:
    path.mkdir()
    settings_with_port(path, port)
    certificates.write_server(path / "certs", "localhost")
    return path


def program(folder: Path, name: str, words: str) -> Path:
    """A stand-in program of that name in Python."""
    folder.mkdir(exist_ok=True)
    place = folder / name
    place.write_text(f"#!{sys.executable}\n{words}\n")
    place.chmod(0o755)
    return place


def killed(process: subprocess.Popen[bytes]) -> None:
    """With its group, as a power cut would."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_its_list_becomes_that_of_the_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept, new, removed, rotated; and an older key under a name that has a newer one goes."""
    link, asked = SuperLink(home(tmp_path / "f")), list[tuple[str, object]]()
    keys, stored = dict[str, Path](), dict[str, bytes]()
    for name in ("kept", "new", "rotated", "twice", "old", "gone"):
        path = tmp_path / f"{name}.pub"
        path.write_bytes(certificates.new_key()[1])
        keys[name], stored[name] = path, public_key(path)
    nodes = [
        NodeFacts("kept", 1, "online", stored["kept"]), NodeFacts("rotated", 2, "offline", stored["old"]),
        NodeFacts("twice", 3, "offline", b"older"), NodeFacts("twice", 4, "online", stored["twice"]),
        NodeFacts("gone", 5, "online", stored["gone"]),
    ]  # fmt: skip
    left = list(nodes)

    def ask(method: str, request: str, **said: object) -> None:
        asked.append((method, said.get("node_id", said.get("name"))))
        left[:] = [node for node in left if node.id != said.get("node_id")]

    monkeypatch.setattr(link, "_ask", ask)
    monkeypatch.setattr(link, "nodes", lambda: list(left))
    monkeypatch.setattr(superlink, "forget_unregistered", lambda path, key: None)
    done = link.keep_keys({name: keys[name] for name in ("kept", "new", "rotated", "twice")})
    assert sorted(asked, key=str) == [
        ("RegisterNode", "new"), ("RegisterNode", "rotated"),
        ("UnregisterNode", 2), ("UnregisterNode", 3), ("UnregisterNode", 5),
    ]  # fmt: skip
    assert [(line.partition(":")[0], "no longer" in line) for line in done] == [
        ("rotated", True), ("twice", True), ("gone", True), ("new", False), ("rotated", False),
    ]  # fmt: skip


def test_it_listens_on_loopback_and_knows_only_registered_nodes(tmp_path: Path) -> None:
    link = SuperLink(home(tmp_path / "f", 18123))
    command = link.command()
    assert command[1:7] == ["-m", processes.SUPERLINK, "--host", "127.0.0.1", "--port", "18123"]
    assert "--enable-supernode-auth" in command and "--insecure" not in command
    with pytest.raises(ConfigError, match=r"it has no federation\.toml"):
        SuperLink(tmp_path)


def test_what_a_child_makes_is_private_and_what_is_left_behind_is_found(tmp_path: Path) -> None:
    """A detached grandchild, as Flower's SuperExec is one, is found by whose it is, and ended."""
    sleeper = program(tmp_path / "bin", "flower-superexec", "import time; time.sleep(60)")
    program(
        tmp_path / "bin", processes.SUPERLINK,
        "import subprocess, sys, time\nopen(sys.argv[1], 'w')\n"
        f"subprocess.Popen([{str(sleeper)!r}], start_new_session=True)\n"
        "time.sleep(60)",
    )  # fmt: skip
    ours, another = tmp_path / "f" / "flwr", tmp_path / "g" / "flwr"
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    made = tmp_path / "superlink.db"
    command = [processes.SUPERLINK, str(made)]
    process = processes.started(command, tmp_path / "logs" / "log", {**processes.environment(ours), "PATH": path})
    env = {**processes.environment(another), "PATH": path}
    other = processes.started(["flower-superexec"], tmp_path / "logs" / "o", env)
    try:
        until = time.monotonic() + 20
        while len(started_for(ours)) < 2 or not made.exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        assert stat.S_IMODE(made.stat().st_mode) == 0o600
        killed(process)
        left = started_for(ours)
        assert len(left) == 1 and left[0].pid not in (process.pid, other.pid)
        processes.end_all_of(ours)
        assert started_for(ours) == [] and other.poll() is None
    finally:
        killed(process)
        killed(other)


def test_a_killed_launcher_leaves_nothing_running(tmp_path: Path) -> None:
    """kill -9 of who started it. Flower's own processes: test_deployment.py."""
    child = program(
        tmp_path / "bin", "stubborn", "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)"
    )  # fmt: skip
    log = tmp_path / "log"
    code = f"""
import os, time
from pathlib import Path
from fedlora.flower import processes
processes.started([{str(child)!r}], Path({str(log)!r}), dict(os.environ))
time.sleep(60)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    launcher = subprocess.Popen([sys.executable, "-c", code], env=env)
    try:
        until = time.monotonic() + 60
        while not processes.tail(log).endswith("\n"):
            assert launcher.poll() is None and time.monotonic() < until
            time.sleep(0.02)
        started = psutil.Process(int(processes.tail(log)))
        assert started.is_running()
    finally:
        launcher.kill()
        launcher.wait()
    _, left = psutil.wait_procs([started], 10)
    assert not left


def test_a_key_can_come_back(tmp_path: Path) -> None:
    """Only the row of an unregistered node goes: one that is registered keeps its key."""
    path = tmp_path / "superlink.db"
    with sqlite3.connect(path) as made:
        made.execute("CREATE TABLE node (node_id INT, public_key BLOB UNIQUE, status TEXT)")
        made.executemany("INSERT INTO node VALUES (?, ?, ?)", [(1, b"a", "unregistered"), (2, b"b", "online")])
    made.close()
    forget_unregistered(path, b"a")
    forget_unregistered(path, b"b")
    with sqlite3.connect(path) as found:
        assert found.execute("SELECT node_id FROM node").fetchall() == [(2,)]
    found.close()
