"""Stock PEFT clients, which know nothing of fedlora. Kind of evidence: oracle (updates by hand), contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedlora import Server, build
from fedlora.errors import ConfigError
from fedlora.flower.messages.codecs import StockClients
from fedlora.server.rules import GeometricMedian, Krum
from support.flower_grid import RANKS, SHAPES, LocalGrid, federation, seed_adapter


class StockNode:
    """A FlowerTune client: gets a PEFT state dict as numpy arrays, adds to it, sends it back."""

    def __init__(self, step: float) -> None:
        self.step = step

    def work(self, record: RecordDict) -> RecordDict:
        state = record.array_records["arrays"].to_torch_state_dict()
        moved = {name: tensor + self.step for name, tensor in state.items()}
        return RecordDict(
            {"arrays": ArrayRecord(moved), "metrics": MetricRecord({"num-examples": 10, "train_loss": 0.5})}
        )


def test_stock_peft_clients_need_nothing_of_fedlora(tmp_path: Path) -> None:
    """alpha / r = 4 at the clients and 1 at the server: the update is the mean of 4 (B + s)(A + s), by hand."""
    ranks = dict.fromkeys(RANKS, 4)
    server = Server(build("glora"), heads="frozen")
    nodes = {name: StockNode(0.1 * (k + 1)) for k, name in enumerate(ranks)}
    strategy, grid = federation(tmp_path, server, ranks, nodes=nodes, codec=StockClients(r=4, alpha=16))
    strategy.start(grid, num_rounds=1)
    start_A = {m: lora.factors[1] for m, lora in seed_adapter(4).modules.items()}
    for module, lora in server.global_update(strategy.flower_state.state.server).items():
        d_out, _ = SHAPES[module]
        want = sum(
            4.0 * torch.full((d_out, 4), 0.1 * (k + 1)).double() @ (start_A[module].double() + 0.1 * (k + 1)) / 3
            for k in range(3)
        )
        torch.testing.assert_close(lora.map(Tensor.double).delta(), want, atol=1e-5, rtol=1e-5)
    names = set(grid.sent[0].content.array_records["arrays"])
    assert names == {f"base_model.model.{m}.lora_{f}.weight" for m in SHAPES for f in "AB"}


@pytest.mark.parametrize("method", ["fedex-lora", "flora", "fedsa-lora", "ffa-lora", "rolora"])
def test_methods_that_stock_clients_cannot_run_are_refused(tmp_path: Path, method: str) -> None:
    with pytest.raises(ConfigError, match="stock PEFT clients do neither"):
        federation(tmp_path, Server(build(method)), dict.fromkeys(RANKS, 4), codec=StockClients(4, 8))
    with pytest.raises(ConfigError, match="stock clients have r = 8"):
        federation(tmp_path, Server(build("glora")), dict.fromkeys(RANKS, 4), codec=StockClients(8, 8))


def test_a_flowertune_server_adopts_it_in_two_lines(tmp_path: Path) -> None:
    """examples/flowertune: the same state dict in as with FedAvg; stock clients receive B = 0 and A of their rank."""
    from fedlora.flower.stock import stock_strategy

    state = {
        f"base_model.model.{m}.lora_{f}.weight": t
        for m, lora in seed_adapter(4).modules.items()
        for f, t in lora.tensors().items()
    }
    strategy = stock_strategy(state, r=4, alpha=16, clients=list(RANKS), names="order", rho=1.0)
    grid = LocalGrid({name: StockNode(0.1) for name in RANKS})  # type: ignore[misc]
    seen: list[tuple[int, set[str]]] = []

    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        seen.append((round, set(arrays)))
        return MetricRecord({"loss": float(round)})

    result = strategy.start(
        grid=grid, initial_arrays=ArrayRecord(state), num_rounds=2, evaluate_fn=evaluate,
        train_config=ConfigRecord({"save_path": "here"}),
    )  # fmt: skip
    assert seen == [(k, set(state)) for k in range(3)] and result.evaluate_metrics_serverapp[2]["loss"] == 2
    assert all(dict(m.content.config_records["config"])["save_path"] == "here" for m in grid.sent)
    model = result.arrays.to_torch_state_dict()  # which set_peft_model_state_dict takes, at the clients' rank and alpha
    assert {k: t.shape for k, t in model.items()} == {k: t.shape for k, t in state.items()}
    with pytest.raises(ConfigError, match="evaluate_config"):
        strategy.start(grid, evaluate_config=ConfigRecord({"a": 1}))
    first = grid.sent[0].content.array_records["arrays"].to_torch_state_dict()
    assert first.keys() == state.keys() and strategy.round == 2 and result.arrays is not None
    for key, tensor in first.items():
        if "lora_B" in key:
            assert not tensor.any()  # B = 0; A may be in other coordinates, which change nothing then
    with pytest.raises(ConfigError, match=r"lora_B.*LoRA factor of rank 8"):
        stock_strategy(state, r=8, alpha=16, clients=["x"])
    with pytest.raises(ConfigError, match="folder=PATH"):  # nothing to resume from, and it would begin again
        stock_strategy(state, r=4, alpha=16, clients=["x"], resume=True)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"names": "bogus"}, "'registered' or 'order'; got 'bogus'"),
        ({"alpha": 0}, "above 0; got 0"),
        ({"alpha": float("nan")}, "above 0; got nan"),
        ({"clients": "c0"}, "list of different names.*got 'c0'"),
        ({"clients": ["x", "x"]}, "list of different names"),
        ({"resume": True, "folder": tmp_path / "typo"}, "typo is not there"),
        ({"peft_state": {k: t for k, t in state.items() if "lora_A" in k}}, "has no lora_B"),
    ]
    for said, words in wrong:
        with pytest.raises(ConfigError, match=words):
            stock_strategy(**({"peft_state": state, "r": 4, "alpha": 16, "clients": ["x"]} | said))
    weighed = stock_strategy(state, r=4, alpha=16, clients=list(RANKS), names="order", rule=GeometricMedian())
    weighed.start(grid=grid, initial_arrays=ArrayRecord(state), num_rounds=1)
    tally = weighed.flower_state.state.server.tally
    assert tally is not None and tally.judged is not None and set(tally.judged.clients) == set(RANKS)
    with pytest.raises(ConfigError, match=r"krum .* needs 5 clients, but a round has 1"):
        stock_strategy(state, r=4, alpha=16, clients=["x"], rule=Krum(f=1))
