"""The planned bytes, beside those that the engine counts. Kind of evidence: *oracle*, the whole federation played.

Six clients of an attention matrix (12, 20), a feed-forward one (20, 8) and a head, half of them each round: planned
from shapes and the draw of the rounds, counted by `simulate` with another stand-in for training.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedlora.core.lora import Adapter, LoRA
from fedlora.core.messages import Client, Download
from fedlora.core.trainer import Trained
from fedlora.experiments.traffic import bytes_of
from fedlora.methods.registry import METHODS
from fedlora.runs.config import parse_config
from fedlora.server.server import start
from fedlora.simulation import simulate
from fedlora.training.skeleton import Shapes

SHAPES = {"layer.self_attn.q": (12, 20), "layer.mlp.up": (20, 8)}
NAMES = [f"site-{k}" for k in range(1, 7)]
ONE_RANK = {"fedit", "fedex-lora", "fedsa-lora", "fedrot-lora", "lora-fair"}


class Trains:
    def train(self, download: Download, adapter: Adapter, position: int) -> Trained:
        torch.manual_seed(position + len(download.client.id) + int(download.client.id[-1]))
        return Trained(adapter.map(lambda t: t + torch.rand(t.shape)), 10 + position, 0.0, position + 3)


def counted(config: Any) -> int:
    kinds = config.clients.assigned(NAMES, config.run.seed)
    clients = [Client(name, kind.ranks(SHAPES)) for name, kind in kinds.items()]
    most = {name: max(c.ranks(SHAPES)[name] for c in clients) for name in SHAPES}
    pairs = {n: LoRA(torch.zeros(a, most[n]), torch.randn(most[n], b)) for n, (a, b) in SHAPES.items()}
    server = config.server.build(config.method.build(), config.run.seed)
    begun = start(server, Adapter(pairs, {"head.weight": torch.zeros(3, 5)}))
    played = simulate(
        server, clients, Trains(), begun, rounds=config.run.rounds, participation=config.run.participation,
        seed=config.run.seed,
    )  # fmt: skip
    return sum(record.bytes.total for record in played)


def config_of(name: str, seed: int = 3, **tables: Any) -> Any:
    ranks = [2] if name in ONE_RANK else [1, 2, {"attention": 3, "feed_forward": 2}, 2, 4, 3]
    raw: dict[str, Any] = {
        "model": {"path": "m"}, "data": {"train": "t.csv"}, "method": {"name": name},
        "clients": {"count": 6, "ranks": ranks}, "run": {"rounds": 9, "participation": 0.5, "seed": seed},
    }  # fmt: skip
    return parse_config({table: {**raw.get(table, {}), **tables.get(table, {})} for table in {**raw, **tables}})


@pytest.mark.parametrize("method", sorted(METHODS))
def test_what_travels_is_known_from_shapes_and_ranks(method: str) -> None:
    """To the byte where nothing depends on numbers; a moved base never takes more than planned, nor less than half."""
    config = config_of(method)
    planned, exact = bytes_of(config, Shapes(SHAPES, {"head.weight": (3, 5)}), NAMES), counted(config)
    assert planned.most == (method in ("fedex-lora", "flora"))
    if planned.most:
        assert exact <= planned.total <= 2 * exact
    else:
        assert planned.total == exact


def test_local_heads_travel_once() -> None:
    shapes = Shapes(SHAPES, {"head.weight": (3, 5)})
    local = config_of("glora", server={"heads": "local"})
    assert bytes_of(local, shapes, NAMES).total == counted(local) < counted(config_of("glora"))
