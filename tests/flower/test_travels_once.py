"""What a site measured between rounds does not travel again to be trained. Kinds of evidence: *count* (bytes of tensors
in each message, of a grid that passes Flower's protobuf), *contract* (the state is bit for bit that of a federation
which never measures, whatever is lost on the way).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")


from fedlora import Server, build
from fedlora.flower.grid import BoundedGrid
from fedlora.flower.server.federation import Federation
from support.flower_grid import FastClock, LocalGrid, bits, play
from support.toy_federations import toy_federation

RANKS = dict.fromkeys(("one", "two", "three"), 4)
METHODS = ["glora", "fedsa-lora", "ffa-lora", "fedex-lora", "rolora", "flora"]


def measuring(folder: Path, method: str, **tables: Any) -> tuple[Federation, LocalGrid]:
    return toy_federation(folder, Server(build(method)), RANKS, **tables)


def sizes(grid: LocalGrid, kind: str, name: str = "two") -> list[int]:
    """Bytes of tensors in each message of a kind to a site, in order."""
    node = next(node for node, (its, _) in grid.nodes.items() if its == name)
    return [
        sum(len(array.data) for array in message.content.array_records["arrays"].values())
        for message in grid.sent
        if message.metadata.dst_node_id == node and message.metadata.message_type == kind
    ]


@pytest.fixture(scope="module")
def unmeasured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """method -> (bits of the state after three rounds, bytes of each training message) where nobody measures."""
    found = {}
    for method in METHODS:
        strategy, grid = measuring(
            tmp_path_factory.mktemp(method), method, data={"label_names": ["a", "b"], "validation": 0.0}
        )
        play(strategy, grid, 3)
        found[method] = bits(strategy.state.server), sizes(grid, "train")
    return found


@pytest.mark.parametrize("method", METHODS)
def test_a_measured_adapter_is_trained_where_it_is(tmp_path: Path, method: str, unmeasured: Any) -> None:
    """Measuring and training of a round together carry what training alone does without measuring, and no byte more."""
    strategy, grid = measuring(tmp_path, method)
    play(strategy, grid, 3)
    state, alone = unmeasured[method]
    measured, trained = sizes(grid, "evaluate"), sizes(grid, "train")
    assert trained == [alone[0], 0, 0] and measured[:2] == alone[1:] and min(measured) > 0
    assert bits(strategy.state.server) == state
    strategy.measure(BoundedGrid(grid, clock=FastClock()), "test")
    assert sizes(grid, "evaluate")[3:] == [0], "at the end the test share is measured of what is there"
