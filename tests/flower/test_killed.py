"""A federation that is killed between any two writes, and started again, has the bits of one that never was, and of the
engine: server and sites die in turn at each place where a file appears, is flushed, goes away, or a message is sent.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedlora import Client, Server, build
from fedlora.flower.server.journal import read_rounds
from fedlora.server.server import start
from fedlora.simulation import simulate
from support.flower_grid import RANKS, LocalGrid, Toy, bits, federation, play, seed_adapter
from support.kills import dying_at
from support.toy_federations import toy_federation

ROUNDS = 3
KINDS = {"glora": RANKS, "fedex-lora": dict.fromkeys(RANKS, 4), "fedsa-lora": dict.fromkeys(RANKS, 4)}


WRITES = [(os, "replace"), (os, "fsync"), (Path, "unlink"), (LocalGrid, "push_messages")]


def told(folder: Path) -> list[dict[str, Any]]:
    """The rounds' lines, without how long each took."""
    return [{k: v for k, v in line.items() if k != "seconds"} for line in read_rounds(folder / "rounds.jsonl")]


def every(stride: int) -> pytest.MarkDecorator:
    """Every so many places, which are others in each round; `make exhaustive` takes all of them."""
    return pytest.mark.parametrize("stride", [stride, pytest.param(1, marks=pytest.mark.exhaustive)])


@every(4)
@pytest.mark.parametrize("method", KINDS)
def test_a_kill_at_any_write_changes_no_bit_and_loses_no_line(tmp_path: Path, method: str, stride: int) -> None:
    """Expected: the in-process engine's state; an unbroken federation's lines. Of a line that a kill cut, a part is on
    the disk; at each fifth place the newest checkpoint is damaged besides, and the one before it is there."""
    server, ranks = Server(build(method)), KINDS[method]
    begun = start(server, seed_adapter())
    *_, last = simulate(server, [Client(n, r) for n, r in ranks.items()], Toy(), begun, rounds=ROUNDS)
    strategy, grid = federation(tmp_path / "whole", server, ranks)
    play(strategy, grid, ROUNDS)
    whole, place, kinds = told(tmp_path / "whole" / "server"), 0, set[str]()
    while True:
        place += stride
        folder = tmp_path / str(place)
        with dying_at(place, WRITES) as died:
            play(*federation(folder, server, ranks), ROUNDS)
        if not died:
            break
        kinds.add(died[0])
        if died[0] == "_append: fsync":
            path = folder / "server" / "rounds.jsonl"
            path.write_bytes(path.read_bytes()[:-40])
        found = sorted((folder / "server" / "checkpoints").glob("round-*"))
        if place % 5 == 0 and len(found) == 2:
            found[-1].write_bytes(found[-1].read_bytes()[:-3])
        strategy, grid = federation(folder, server, ranks)
        play(strategy, grid, ROUNDS)
        assert bits(strategy.state.server) == bits(last.state.server), (place, died)
        assert told(folder / "server") == whole, (place, died)
    assert place > 60 and {"_append: fsync", "replacing: replace", "_remove_older: unlink"} <= kinds, kinds


@every(7)
def test_a_federation_that_measures_chooses_the_same_round_wherever_it_is_killed(tmp_path: Path, stride: int) -> None:
    """Scores of each site, the best round and its stored state; the writes of a measurement are among the places.
    Expected: those of a federation that was never killed."""
    server = Server(build("fedsa-lora"))
    strategy, grid = toy_federation(tmp_path / "whole", server, KINDS["fedsa-lora"])
    play(strategy, grid, ROUNDS)
    whole, best, state, place = told(tmp_path / "whole" / "server"), strategy.best, bits(strategy.state.server), 0
    assert best is not None and all(set(line["site_metrics"]) == set(RANKS) for line in whole)
    while True:
        place += stride
        with dying_at(place, WRITES) as died:
            play(*toy_federation(tmp_path / str(place), server, KINDS["fedsa-lora"]), ROUNDS)
        if not died:
            break
        strategy, grid = toy_federation(tmp_path / str(place), server, KINDS["fedsa-lora"])
        play(strategy, grid, ROUNDS)
        assert bits(strategy.state.server) == state and told(tmp_path / str(place) / "server") == whole, (place, died)
        found = strategy.best_state()
        assert found is not None and found.round == best["round"], (place, died)
    assert place > 100
