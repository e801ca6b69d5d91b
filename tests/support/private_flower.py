"""A private federation of toys over Flower's wire format: journal, ledger and list of releases are the real ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedlora import Server, build
from fedlora.flower.site.node import Node
from fedlora.flower.strategy import FedLoRA
from fedlora.privacy import Budget, Ledger
from fedlora.runs.private_releases import OnDisk, Planned
from fedlora.runs.private_run import PrivacyPlan, PrivateRun
from fedlora.server.private import Private
from fedlora.server.private_round import PrivateRound
from support.flower_grid import RANKS, RUN, LocalGrid, Toy, seed_adapter

DELTA = 1e-3


def private_run(
    folder: Path, members: Mapping[str, Any] = RANKS, *, method: str = "glora", budget: Budget | None = None,
    dims: int | None = 3,
) -> PrivateRun:  # fmt: skip
    """Three rounds with z = 1, charged to FOLDER/ledger.jsonl and kept in FOLDER/private."""
    privacy = Private(1.0, 1.0, tuple(members), 4, Planned(), dims)
    server = Server(build(method), round=privacy)
    opened = server.open(server.init(seed_adapter()))
    assert isinstance(opened, PrivateRound)
    size = opened.layout.size
    plan = PrivacyPlan(20.0, DELTA, 3, 1.0, 1.0, privacy.sampling, len(members), 4, size, 0.0, {})
    ledger = Ledger(folder / "ledger.jsonl", "toys")
    releases = OnDisk(folder / "private", "this-run", ledger, budget, 3, DELTA)
    return PrivateRun(replace(server, round=replace(privacy, releases=releases)), releases, plan)


def private_federation(
    folder: Path, members: Mapping[str, Any] = RANKS, *, trainer: Any = None, run: PrivateRun | None = None
) -> tuple[FedLoRA, LocalGrid]:
    found = run or private_run(folder, members)
    strategy = FedLoRA(found.server, members, adapter=seed_adapter(), run=RUN, folder=folder / "server")
    strategy.private = found
    return strategy, LocalGrid({name: Node(name, trainer or Toy(), folder / "nodes" / name) for name in members})


def leave(grid: LocalGrid, *names: str) -> None:
    """They are online when they are waited for (as in round 1 all are), and their messages are not taken."""
    push = grid.push_messages

    def push_messages(messages: Any) -> Any:
        if grid.nodes[messages[0].metadata.dst_node_id][0] in names:
            grid.offline = set(names)
            return [""]
        return push(messages)

    grid.push_messages = push_messages  # type: ignore[method-assign]
