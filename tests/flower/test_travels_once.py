"""What travels is what the engine counts, and what a site measured between rounds does not travel again to be trained.
Kinds of evidence: *count* (bytes of tensors in each message, of a grid that passes Flower's protobuf, against
`Traffic`), *parity* (the state is bit for bit that of the engine, which measures nothing).
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedlora import Client, Server, build
from fedlora.flower.grid import BoundedGrid
from fedlora.server.server import start
from fedlora.simulation import simulate
from support.flower_grid import FastClock, LocalGrid, Toy, bits, close, play, seed_adapter
from support.toy_federations import toy_federation

RANKS = dict.fromkeys(("one", "two", "three"), 4)
METHODS = ["glora", "fedsa-lora", "ffa-lora", "fedex-lora", "rolora", "flora", "fedsvd"]


def sizes(grid: LocalGrid, kind: str) -> list[int]:
    """Bytes of tensors in the messages of a kind to all sites, by round."""
    sent = [message.content.array_records["arrays"] for message in grid.sent if message.metadata.message_type == kind]
    each = [sum(len(array.data) for array in arrays.values()) for arrays in sent]
    return [sum(each[k : k + len(RANKS)]) for k in range(0, len(each), len(RANKS))]


@pytest.mark.parametrize("method", METHODS)
def test_a_measured_adapter_is_trained_where_it_is(tmp_path: Path, method: str) -> None:
    """Frozen parts go once, base changes in steps. Measuring and training of a round together carry what the engine
    counts for training, and no byte more."""
    server = Server(build(method))
    strategy, grid = toy_federation(tmp_path, server, RANKS)
    play(strategy, grid, 3)
    clients = [Client(name, rank) for name, rank in RANKS.items()]
    records = list(simulate(server, clients, Toy(), start(server, seed_adapter()), rounds=3))
    down = [each.bytes.down_adapter + each.bytes.down_heads + each.bytes.down_base for each in records]
    measured, trained = sizes(grid, "evaluate"), sizes(grid, "train")
    assert trained == [down[0], 0, 0] and measured[:2] == down[1:] and min(measured) > 0
    if method == "flora":  # a site adds up the steps of its base: rounding differs
        close(strategy.state.server, records[-1].state.server)
    else:
        assert bits(strategy.state.server) == bits(records[-1].state.server)
    strategy.measure(BoundedGrid(grid, clock=FastClock()), "test")
    assert sizes(grid, "evaluate")[3:] == [0], "at the end the test share is measured of what is there"
