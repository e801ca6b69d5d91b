"""The SuperLink's folder, database and processes, without a SuperLink. Kind: *unit*. With one: test_deployment.py."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytest.importorskip("flwr")

from fedlora.errors import ConfigError
from fedlora.flower import processes
from fedlora.flower.server import superlink
from fedlora.flower.server.superlink import NodeFacts, SuperLink, forget_unregistered, public_key
from fedlora.flower.terms import certificates
from support.machines import until
from support.small_apps import settings_with_port


def home(path: Path, port: int = 1) -> Path:
    path.mkdir()
    settings_with_port(path, port)
    certificates.write_server(path / "certs", "localhost")
    return path


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


def test_a_killed_launcher_leaves_nothing_running(tmp_path: Path) -> None:
    """kill -9 of who started it. What it made is for this user only. Flower's own processes: test_deployment.py."""
    child = "import os, time; open('made', 'w'); print(os.getpid(), flush=True); time.sleep(60)"
    code = f"""
import os, sys, time
from pathlib import Path
from fedlora.flower import processes
processes.started([sys.executable, "-c", {child!r}], Path("log"), os.environ)
time.sleep(60)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    launcher, log = subprocess.Popen([sys.executable, "-c", code], env=env, cwd=tmp_path), tmp_path / "log"
    try:
        until(lambda: processes.tail(log).endswith("\n"), 60, "it starts")
        started = psutil.Process(int(processes.tail(log)))
        assert started.is_running() and (tmp_path / "made").stat().st_mode & 0o077 == 0
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
