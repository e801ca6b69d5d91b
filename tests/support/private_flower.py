"""A private federation of toys over Flower's wire format: journal, ledger and list of releases are the real ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlora import Server, build
from fedlora.flower.rounds.flower_state import newest
from fedlora.flower.rounds.private_rounds import PrivateRounds
from fedlora.flower.rounds.strategy import FedLoRA
from fedlora.flower.site.node import Node
from fedlora.flower.terms.policy import Policy
from fedlora.flower.terms.privacy import FederationPrivacy
from fedlora.privacy import Budget, Ledger
from fedlora.runs.private_releases import OnDisk, Planned
from fedlora.runs.private_run import PrivateRun, plan_of
from fedlora.server.private import Private
from fedlora.server.private_round import PrivateRound
from fedlora.server.server import start
from support.flower_grid import RANKS, RUN, FastClock, LocalGrid, Toy, seed_adapter

DELTA = 1e-3


def private_run(
    folder: Path, members: Mapping[str, Any] = RANKS, *, method: str = "glora", rounds: int = 3,
    budget: Budget | None = None, dims: int | None = 3, noise: float = 1.0,
) -> PrivateRun:  # fmt: skip
    """Its rounds are charged to FOLDER/ledger.jsonl, and kept in FOLDER/private."""
    privacy = Private(1.0, noise, tuple(members), 4, Planned(), dims)
    server = Server(build(method), round=privacy)
    opened = server.open(server.init(seed_adapter()))
    assert isinstance(opened, PrivateRound)
    plan = plan_of(privacy, opened.layout, opened.mechanism, rounds, 20.0, DELTA)
    ledger = Ledger(folder / "ledger.jsonl", "toys")
    releases = OnDisk(folder / "private", "this-run", ledger, budget, rounds, DELTA)
    return PrivateRun(
        replace(server, round=replace(privacy, releases=releases)), releases, plan
    )  # fmt: skip


def private_federation(
    folder: Path, members: Mapping[str, Any] = RANKS, *, trainer: Any = None, policy: Policy | None = None,
    run: PrivateRun | None = None, others: tuple[str, ...] = (), **more: Any,
) -> tuple[FedLoRA, LocalGrid]:  # fmt: skip
    """others: nodes of strangers that are online too."""
    found = run or private_run(folder, members)
    terms = FederationPrivacy(
        clip=1.0, noise_multiplier=1.0, delta=DELTA, population="toys", ledger="ledger.jsonl", members=list(members)
    )
    state = start(found.server, seed_adapter())
    strategy = FedLoRA(
        found.server,
        policy or Policy(members, retries=0, deadline=50.0),
        state,
        hooks=PrivateRounds(found, terms),
        run=RUN,
        folder=folder / "server",
        record=folder / "out",
        resume=newest(folder / "server", RUN, found.server, state.server),
        clock=more.pop("clock", None) or FastClock(),
        **more,
    )
    names = [*members, *others]
    return strategy, LocalGrid({name: Node(name, trainer or Toy(), folder / "nodes" / name) for name in names})


def leave(grid: LocalGrid, *names: str) -> None:
    """They are online when they are waited for (as in round 1 all are), and gone before anybody is asked."""
    look = grid.get_nodes

    def get_nodes() -> Any:
        found = look()
        grid.offline = set(names)
        return found

    grid.get_nodes = get_nodes  # type: ignore[method-assign]


def same_noise(self: Any, total: Tensor) -> Tensor:
    """In place of `Mechanism.noised`: the same noise whenever vectors are as long, so that sums can be compared."""
    return total + fixed_noise(len(total))


def same_release(self: Any, total: Tensor) -> Tensor:
    """In place of `Mechanism.noised`: what is released says nothing of the sum, so that all that differs otherwise is
    a leak."""
    return fixed_noise(len(total))


def fixed_noise(size: int) -> Tensor:
    made = torch.randn(size, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return (made * 2**18).round().to(torch.int64)
