"""What a federation writes does not grow with its rounds. Kind of evidence: *count*, of Flower's own database on disk,
and of every file beside it, over fifty rounds of toy nodes that also measure.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedlora import Server, build
from fedlora.flower.rounds.strategy import FedLoRA
from fedlora.flower.serving import database
from fedlora.flower.site.node import Node
from fedlora.flower.terms.policy import Policy
from fedlora.server.server import start
from support.flower_grid import FastClock, Toy, seed_adapter
from support.stored_link import StoredLink
from test_travels_once import EVERY, RANKS, Ruler

ROUNDS = 50


@pytest.mark.filterwarnings("ignore")
def test_database_and_checkpoints_are_bounded_over_fifty_rounds(tmp_path: Path) -> None:
    ruler: Any = {"validation": Ruler(), "test": Ruler()}
    nodes = {name: Node(name, Toy(), tmp_path / "nodes" / name, evaluators=ruler) for name in RANKS}
    link = StoredLink(tmp_path / "state.db", nodes)
    sizes, checkpoints = list[int](), list[int]()

    def after(line: Any) -> None:
        with sqlite3.connect(link.database) as file:
            file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        sizes.append(database.size(link.database))
        checkpoints.append(sum(one.stat().st_size for one in (tmp_path / "checkpoints").iterdir()))

    server = Server(build("glora", history_limit=3), quorum=3, seed=3)
    strategy = FedLoRA(
        server, Policy(RANKS), start(server, seed_adapter()), folder=tmp_path / "checkpoints", record=tmp_path,
        asking=EVERY, after_round=after, clock=FastClock(),
    )  # fmt: skip
    strategy.start(link.grid, num_rounds=ROUNDS)
    assert {fated.fate for fated in strategy.fates.values()} == {"trained"} and len(sizes) == ROUNDS
    print("database", sizes[0], sizes[9], sizes[-1], "checkpoints", checkpoints[1], checkpoints[-1])
    with sqlite3.connect(link.database) as file:
        tables = [name for (name,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        rows = {name: file.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in tables}
    print(rows)
    assert max(sizes) <= 1.5 * sizes[9]
    assert max(checkpoints) <= 1.1 * checkpoints[1]
