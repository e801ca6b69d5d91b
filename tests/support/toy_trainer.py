"""A stand-in for training in the in-process engine: no model, no text (`federations.pushed`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from fedlora import Adapter, Client, Download, Kept, Server, build
from fedlora.analysis.audit import GaugeStress
from fedlora.core.trainer import Trained
from fedlora.server.rounds import RoundKind
from fedlora.server.server import start
from fedlora.server.state import RunState
from fedlora.simulation import RoundRecord, simulate
from support.federations import EQUAL, EXAMPLES, pushed, seed_adapter

BATCH = 7  # examples that a round of the toy trainer takes


def _as_it_is(download: Download, trained: Trained) -> Trained:
    return trained


class Toy:
    """Trains by a push that depends on client, round and data position alone. Remembers whom it served."""

    def __init__(self, wrong: Callable[[Download, Trained], Trained] = _as_it_is) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self._wrong = wrong

    def train(self, download: Download, adapter: Adapter, position: int) -> Trained:
        client, t = download.client.id, download.round
        self.calls.append((client, t, position))
        moved = pushed(adapter, client, 1000 * t + position)
        return self._wrong(download, Trained(moved, EXAMPLES[client], loss(client, t), position + BATCH))


def loss(client: str, round: int) -> float:
    return ord(client) + round / 10


def clients(ranks: Mapping[str, int]) -> list[Client]:
    return [Client(name, rank) for name, rank in ranks.items()]


def run(
    name: str = "glora",
    ranks: Mapping[str, int] = EQUAL,
    trainer: Any = None,
    *,
    state: RunState | None = None,
    rounds: int = 3,
    dtype: torch.dtype = torch.float32,
    hparams: Mapping[str, Any] | None = None,
    round: RoundKind = Kept(),  # noqa: B008 - a frozen value
    gauge_stress: float | None = None,
    **options: Any,
) -> Iterator[RoundRecord]:
    s = Server(build(name, **(hparams or {})), round=round)
    state = state or start(s, seed_adapter(max(ranks.values()), dtype))
    if gauge_stress is not None:
        options["hooks"] = [GaugeStress(gauge_stress, options.get("seed", 0))]
    return simulate(s, clients(ranks), trainer or Toy(), state, rounds=rounds, **options)


def diverging(client: str, round: int) -> Toy:
    """Training gives NaN, as a real divergence does: in all factors, heads and the loss."""

    def wrong(download: Download, trained: Trained) -> Trained:
        if (download.client.id, download.round) == (client, round):
            return replace(trained, adapter=trained.adapter.map(lambda t: t * math.nan), loss=math.nan)
        return trained

    return Toy(wrong)
