"""What a federation writes does not grow with its rounds. Kind of evidence: *count*, of the rows and bytes of the
database that Flower keeps on disk, and of the checkpoints, with toy nodes that train and measure.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedlora import Kept, Server, build
from fedlora.flower.grid import BoundedGrid
from fedlora.flower.site.node import Node
from fedlora.flower.strategy import FedLoRA
from support.flower_grid import FastClock, Toy, fates, seed_adapter
from support.stored_link import StoredLink
from support.toy_federations import Ruler

RANKS = dict.fromkeys(("one", "two", "three"), 4)


def rows(path: Path) -> dict[str, int]:
    """Table -> the number of its rows."""
    with closing(sqlite3.connect(path)) as file:
        tables = [name for (name,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {name: file.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in tables}


@pytest.mark.filterwarnings("ignore:No path_separator found:DeprecationWarning")  # flwr's, of its alembic.ini
@pytest.mark.parametrize("rounds", [3, pytest.param(50, marks=[pytest.mark.exhaustive, pytest.mark.timeout(1800)])])
def test_no_row_and_no_file_is_left_of_a_finished_round(tmp_path: Path, rounds: int) -> None:
    """Every table has as many rows after a round as before the first: none holds a message, or a piece of one."""
    ruler: Any = {"validation": Ruler(), "test": Ruler()}
    nodes = {name: Node(name, Toy(), tmp_path / "nodes" / name, evaluators=ruler) for name in RANKS}
    link, left = StoredLink(tmp_path / "state.db", nodes), list[dict[str, int]]()
    before, sizes, checkpoints = rows(link.database), list[int](), list[int]()

    def after(round: int, _: Any) -> bool:
        left.append(rows(link.database))
        sizes.append(sum(one.stat().st_size for one in tmp_path.glob("state.db*")))
        checkpoints.append(sum(one.stat().st_size for one in (tmp_path / "checkpoints").iterdir()))
        return False

    strategy = FedLoRA(
        Server(build("glora"), round=Kept(quorum=3)), RANKS, adapter=seed_adapter(), folder=tmp_path,
        fraction_evaluate=1.0,
    )  # fmt: skip
    strategy.start(BoundedGrid(link.grid, clock=FastClock()), num_rounds=rounds, should_stop=after)
    assert set(fates(strategy).values()) == {"trained"} and len(left) == rounds
    assert [{name: n for name, n in one.items() if n > before[name]} for one in left] == [
        {"objectstore_locks": 1}
    ] * rounds
    assert max(sizes) <= 1.1 * sizes[1], sizes
    assert max(checkpoints) <= 1.1 * checkpoints[1], checkpoints
