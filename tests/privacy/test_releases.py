"""The list of what may leave. Kind of evidence: contract, on what the code writes today."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedlora import Adapter, Client, LoRA, Server, Upload, build, receive, send
from fedlora.core.sent import Attacked
from fedlora.privacy.releases import EMPTY, filtered
from fedlora.simulation import RoundRecord, Traffic


def a_record() -> RoundRecord:
    """With all that a round can have, attacked and judged."""
    plain = {"clients": {"a": {"weight": 0.5, "coefficient": 0.5, "norm": 1.0, "reason": ""}}}
    state: Any = SimpleNamespace(
        server=SimpleNamespace(tally=SimpleNamespace(judged=SimpleNamespace(plain=lambda: plain)))
    )
    return RoundRecord(
        1, state, {"a": 0.5}, {"a": 1.0}, {"b": "why"}, {"accuracy": 1.0}, {"train": 1.0}, Traffic(), 2.0, (),
        Attacked("scale", {"a": {"norm": 2.0}}),
    )  # fmt: skip


def test_of_a_round_only_these_values_are_written() -> None:
    """Of `runs.storing.describe` itself; its other tables stay, empty, for readers of the file."""
    storing = pytest.importorskip("fedlora.runs.storing")
    line = {**storing.describe(a_record(), padded_error=0.1, gauge={"glora": 0.0}), "privacy": {}, "new": 1}
    found = filtered("metrics.jsonl", line)
    assert {name for name, value in found.items() if value not in ({}, None)} == {"round", "server_rank", "metrics"}
    assert set(line) - set(found) == {"attack", "robust", "new"}


def test_a_tracker_of_a_private_round_gets_four_things() -> None:
    tracking = pytest.importorskip("fedlora.runs.tracking")
    storing = pytest.importorskip("fedlora.runs.storing")
    sites = {"site_metrics": {"a": {"accuracy": 0.5}}, "site_mean": {"accuracy": 0.5}, "norms": {"a": 1.0}}
    line = {**storing.describe(a_record()), **sites, "privacy": {"epsilon": 1.0, "epsilon_planned": 8.0}}
    told = {"server_rank", "metrics/accuracy", "privacy/epsilon", "privacy/epsilon_planned"}
    assert set(tracking.numbers(line)) == told


def diagnostics(name: str) -> Mapping[str, Any]:
    server = Server(build(name))
    state = server.init(Adapter({"q": LoRA(torch.zeros(6, 2), torch.ones(2, 5) + torch.eye(2, 5))}))
    uploads = []
    for client in (Client("a", 2), Client("b", 2)):
        adapter = receive(server.download(state, client), None).map(lambda t: t + 0.1 * torch.ones_like(t))
        uploads.append(Upload(client, 5, send(adapter, server.roles(state))))
    return server.diagnostics(server.aggregate(state, uploads))


@pytest.mark.parametrize("name", ["glora", "svd", "flexlora", "ffa-lora"])
def test_of_a_method_s_numbers_those_of_its_state_are_written(name: str) -> None:
    """What was measured on uploads (captured, error, weights, ...) is not. A module's name with dots is one name."""
    found = {"layer.0.q": diagnostics(name)["q"], "k": 5}
    left = filtered("summary.json", {"diagnostics": found})["diagnostics"]
    assert set(left) == {"layer.0.q"}
    assert set(left["layer.0.q"]) <= {"rank", "components", "server_rank", "singular_values"}
    assert filtered("summary.json", {"diagnostics": 5}) == EMPTY["summary.json"]
