"""Rounds over a real SuperLink by `flwr run`, with a node that sends far too much. Kind of evidence: *attack*, end to
end.

Marked `deployment_all`: real processes on loopback.
"""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedlora.flower import processes
from fedlora.flower.server.journal import read_now
from support.machines import answers, free_port, until
from support.small_apps import APP

pytestmark = [pytest.mark.deployment_all, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]


def played(folder: Path, plan: list[Any]) -> None:
    """The rounds of `plan`, by a SuperLink and three nodes."""
    (folder / "plan.json").write_text(json.dumps(plan))
    app, home, port = folder / "app", folder / "flwr", free_port()
    (app / "changed").mkdir(parents=True)
    shim = "from support.bomb_app import {}_app as app\n__all__ = ['app']\n"  # Flower looks for the name in the text
    shims = {f"changed/{side}.py": shim.format(side) for side in ("server", "client")}
    for name, text in (APP | shims).items():
        (app / name).write_text(text)
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    env = {**processes.environment(home), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "BOMB_APP": str(folder),
           "OMP_NUM_THREADS": "1"}  # fmt: skip
    made = []

    def started(name: str, *command: str) -> None:
        made.append(processes.started(command, folder / f"{name}.log", env))

    try:
        started("superlink", "flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(port),
                "--database", str(folder / "state.db"), "--disable-runtime-dependency-installation")  # fmt: skip
        until(lambda: answers(port), 60, "the SuperLink answers")
        for name in ("node-1", "node-2", "node-3"):
            started(name, "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}",
                    "--port", str(free_port()))  # fmt: skip
        started("run", "flwr", "run", str(app), "here", "--stream")
        until(lambda: read_now(folder / "now.json").get("ended"), 270, "all rounds are played")
    finally:
        processes.end_all_of(home)
        for process in made:
            process.wait()


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
    with closing(sqlite3.connect(tmp_path / "state.db")) as file:  # Flower's database keeps nothing of a finished round
        for table in ("message_ins", "message_res", "objects", "object_children", "run_objects"):
            assert file.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,), table
