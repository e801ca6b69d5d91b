"""Rounds over a real SuperLink, with a node that sends far too much. Kind of evidence: *attack*, end to end.

Marked `deployment_all`: real processes on loopback.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedlora.flower.server.journal import read_now

pytestmark = [pytest.mark.deployment_all, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
APP = """\
[project]
name = "bomb-app"
version = "1.0.0"
description = "test"
license = { file = "LICENSE" }
dependencies = ["flwr>=1.41.0"]
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[tool.flwr.app]
publisher = "fedlora"
fab-format-version = 1
flwr-version-target = "1.41.0"
[tool.flwr.app.components]
serverapp = "bomb.server:app"
clientapp = "bomb.client:app"
[tool.flwr.app.config]
x = 1
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def ended(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Whatever was started has ended after this."""
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            time.sleep(1)
        for process in processes:
            process.wait()


def played(folder: Path, plan: list[Any]) -> None:
    """The rounds of `plan`, by a SuperLink and three nodes."""
    (folder / "plan.json").write_text(json.dumps(plan))
    app, port = folder / "app", free_port()
    (app / "bomb").mkdir(parents=True)
    (app / "pyproject.toml").write_text(APP)
    (app / "LICENSE").write_text("none\n")
    (app / "bomb" / "__init__.py").write_text("")
    for side in ("server", "client"):
        (app / "bomb" / f"{side}.py").write_text(f"from support.bomb_app import {side}_app as app\n__all__ = ['app']\n")
    (folder / "flwr").mkdir()
    (folder / "flwr" / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    env = {
        **os.environ,
        "FLWR_HOME": str(folder / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "BOMB_APP": str(folder),
        "NO_PROXY": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }
    processes: list[subprocess.Popen[bytes]] = []

    def started(name: str, *command: str) -> subprocess.Popen[bytes]:
        with (folder / f"{name}.log").open("wb") as log:
            made = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        processes.append(made)
        return made

    with ended(processes):
        started("superlink", "flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(port),
                "--database", str(folder / "state.db"), "--disable-runtime-dependency-installation")  # fmt: skip
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.3)
        for name in ("one", "two", "bomb"):
            started(name, "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}",
                    "--port", str(free_port()), "--node-config", f'client="{name}"')  # fmt: skip
        started("run", "flwr", "run", str(app), "here", "--stream")
        until = time.monotonic() + 270
        while time.monotonic() < until:
            if read_now(folder / "now.json").get("ended"):
                return
            time.sleep(0.5)
        logs = "\n".join(f"{p.name}: {p.read_text(errors='replace')[-1500:]}" for p in folder.glob("*.log"))
        raise AssertionError(f"not within 270 s\n{logs}")


def test_a_reply_of_half_a_gigabyte_costs_its_sender_the_round_and_the_server_no_memory(tmp_path: Path) -> None:
    """Once of equal pieces (one travels, a hundred are unpacked), once of pieces that differ, once in its text."""
    played(tmp_path, [["nothing", 0], ["equal", 500], ["distinct", 60], ["said", 30]])
    lines = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert [line["fates"]["bomb"]["fate"] for line in lines] == ["trained", "refused", "refused", "refused"]
    assert all(line["fates"][name]["fate"] == "trained" for line in lines for name in ("one", "two"))
    assert re.search("500,0.* 20,000,000 are allowed", lines[1]["fates"]["bomb"]["why"])
    peaks = json.loads((tmp_path / "peaks.json").read_text())
    print("peak memory of the ServerApp in MB, before the rounds and after each:", peaks)
    assert peaks[4] - peaks[1] < 100, peaks  # MB; the first round loads what any round needs
