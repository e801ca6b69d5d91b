"""The engine is the reference: the same server state, bit for bit, with every message through Flower's wire format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

from fedlora import Client, Server, build
from fedlora.server.server import start
from fedlora.simulation import simulate
from support.flower_grid import RANKS, Watching, bits, close, federation, play, seed_adapter

ONE_RANK = ("fedit", "fedsa-lora", "fedex-lora", "rolora", "lora-fair", "fedrot-lora")
MIXED = ("glora", "flexlora", "svd", "ffa-lora", "fedsvd", "flora", "hetlora")


@pytest.mark.quick(7)
@pytest.mark.parametrize("method", [*MIXED, *ONE_RANK])
@pytest.mark.parametrize("participation", [1.0, 0.7])
def test_flower_and_the_engine_have_the_same_server_state(tmp_path: Path, method: str, participation: float) -> None:
    """Three rounds, clients' state on disk: bit for bit `simulate`'s, and so is what each client was given to train."""
    ranks = dict.fromkeys(RANKS, 4) if method in ONE_RANK else RANKS
    server, there, here = Server(build(method), seed=3), Watching(), Watching()
    strategy, grid = federation(tmp_path, server, ranks, fraction_train=participation, seed=5, trainer=there)
    play(strategy, grid, 3)
    clients, begun = [Client(name, rank) for name, rank in ranks.items()], start(server, seed_adapter())
    *_, last = simulate(server, clients, here, begun, rounds=3, participation=participation, seed=5)
    if server.method.moves_base and participation < 1:  # who was away adds up the steps that it missed, which rounds
        close(strategy.state.server, last.state.server)
        return
    assert bits(strategy.state.server) == bits(last.state.server)
    assert there.got == here.got  # also what clients do not train, and the server replaces (fedsvd's A)
    torch.testing.assert_close(there.bases, here.bases, rtol=0, atol=1e-5)
