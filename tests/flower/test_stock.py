"""Stock PEFT clients, which know nothing of fedlora. Kind of evidence: oracle (updates by hand), contract."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedlora import AdapterSpec, read_adapter
from fedlora.errors import ConfigError
from fedlora.flower import BoundedGrid, FedLoRA
from fedlora.flower.site.node import Node
from support.flower_grid import RANKS, SHAPES, FastClock, LocalGrid, Toy, changed, fates, seed_adapter

PEFT = "base_model.model.{}.lora_{}.weight"
STATE = {PEFT.format(m, f): t for m, lora in seed_adapter(4).modules.items() for f, t in lora.tensors().items()}
STEPS = {name: 0.1 * (k + 1) for k, name in enumerate(RANKS)}


class StockNode:
    """A FlowerTune client: gets a PEFT state dict as numpy arrays, adds to it, sends it back."""

    def __init__(self, step: float) -> None:
        self.step = step

    def work(self, record: RecordDict) -> RecordDict:
        state = record.array_records["arrays"].to_torch_state_dict()
        metrics = MetricRecord({"num-examples": 10, "train_loss": 5 * self.step})
        return RecordDict({"arrays": ArrayRecord({k: t + self.step for k, t in state.items()}), "metrics": metrics})

    def measure(self, record: RecordDict) -> RecordDict:
        return RecordDict({"metrics": MetricRecord({"num-examples": int(100 * self.step), "accuracy": self.step})})


def stock_grid() -> LocalGrid:
    return LocalGrid({name: StockNode(step) for name, step in STEPS.items()})  # type: ignore[misc]


def start(strategy: FedLoRA, grid: LocalGrid, rounds: int, state: Any = STATE, **more: Any) -> Any:
    return strategy.start(BoundedGrid(grid, clock=FastClock()), ArrayRecord(state), num_rounds=rounds, **more)


def test_stock_peft_clients_need_nothing_of_fedlora() -> None:
    """alpha / r = 4 at the clients and 1 at the server: the update is the mean of 4 (B + s)(A + s), by hand. Their loss
    is the mean of 0.5, 1 and 1.5, and their accuracy that of 0.1, 0.2 and 0.3 with weights 10, 20 and 30."""
    grid, strategy = stock_grid(), FedLoRA("glora", 3, r=4, lora_alpha=16, fraction_evaluate=1.0)
    result = start(strategy, grid, 1)
    start_A = {m: lora.factors[1].double() for m, lora in seed_adapter(4).modules.items()}
    for module, lora in strategy.server.global_update(strategy.state.server).items():
        d_out, _ = SHAPES[module]
        want = sum(4.0 * torch.full((d_out, 4), s).double() @ (start_A[module] + s) / 3 for s in STEPS.values())
        torch.testing.assert_close(lora.map(Tensor.double).delta(), want, atol=1e-5, rtol=1e-5)
    assert set(grid.sent[0].content.array_records["arrays"]) == set(STATE)
    assert result.train_metrics_clientapp[1]["train_loss"] == pytest.approx(1.0)
    assert result.evaluate_metrics_clientapp[1]["accuracy"] == pytest.approx((0.1 * 10 + 0.2 * 20 + 0.3 * 30) / 60)


def test_a_flowertune_server_adopts_it_in_two_lines() -> None:
    """examples/flower/flowertune: all else of `start` is FedAvg's, and what comes back loads into the model."""
    grid, strategy = stock_grid(), FedLoRA("glora", 3, r=4, lora_alpha=16)
    seen: list[tuple[int, set[str]]] = []

    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        seen.append((round, set(arrays)))
        return MetricRecord({"loss": float(round)})

    config = ConfigRecord({"save_path": "here"})
    result = start(strategy, grid, 2, evaluate_fn=evaluate, train_config=config, timeout=60)
    assert seen == [(k, set(STATE)) for k in range(3)] and result.evaluate_metrics_serverapp[2]["loss"] == 2
    sent = [dict(m.content.config_records["config"]) for m in grid.sent]
    assert sent == [{"save_path": "here", "server-round": k} for k in (1, 1, 1, 2, 2, 2)]
    model = result.arrays.to_torch_state_dict()
    assert {k: t.shape for k, t in model.items()} == {k: t.shape for k, t in STATE.items()}
    first = grid.sent[0].content.array_records["arrays"].to_torch_state_dict()
    assert not any(t.any() for k, t in first.items() if "lora_B" in k), "B = 0; A may be in other coordinates"
    assert not [*strategy.configure_evaluate(2, ArrayRecord(), ConfigRecord(), grid)], "fraction_evaluate is 0"
    stopped = FedLoRA("glora", 3, r=4, lora_alpha=16)
    start(stopped, stock_grid(), 9, should_stop=lambda round, result: round == 2)
    assert stopped.round == 2


def test_a_stock_clients_fault_is_its_own() -> None:
    def other(asked: Message, reply: Message) -> Message:
        reply.content["arrays"] = ArrayRecord({"base_model.model.head.weight": torch.zeros(2, 2)})  # type: ignore[dict-item]
        return reply

    def diverged(asked: Message, reply: Message) -> Message:
        reply.content["metrics"] = MetricRecord({"num-examples": 10, "train_loss": float("nan")})
        return reply

    for meddle in (diverged, changed(num_examples=-1), other):
        grid, strategy = stock_grid(), FedLoRA("glora", [*RANKS], r=4, lora_alpha=16)
        grid.meddle = {"two": meddle}
        start(strategy, grid, 1)
        assert fates(strategy) == {"one": "trained", "two": "refused", "three": "trained"}


@pytest.mark.parametrize("method", ["fedex-lora", "flora", "fedsa-lora", "ffa-lora", "rolora"])
def test_methods_that_stock_clients_cannot_run_are_refused(method: str) -> None:
    with pytest.raises(ConfigError, match="stock PEFT clients do neither"):
        start(FedLoRA(method, 3, r=4, lora_alpha=8), stock_grid(), 1)


def test_what_cannot_be_is_said_before_the_first_round(tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], Any, str]] = [
        ({"r": 8}, STATE, r"rank \[4\], .* r = "),
        ({}, {k: t for k, t in STATE.items() if "lora_A" in k}, "has no lora_B"),
        ({}, {**STATE, "classifier.weight": torch.zeros(2, 2)}, "classifier.weight is no LoRA factor"),
        ({"clients": 4}, STATE, "4 clients, .* and 3 nodes are online"),
        ({"lora_alpha": 0}, STATE, "r and lora_alpha"),
        ({"r": None}, STATE, "r and lora_alpha"),
        ({"clients": ["x", "x"]}, STATE, "list of different names"),
        ({"clients": "site-1"}, STATE, "list of different names"),
        ({"names": "orders"}, STATE, "names is 'registered' or 'order'"),
        ({"fraction_evaluate": 2}, STATE, "shares up to 1"),
        ({"fraction_train": 0}, STATE, "shares up to 1"),
    ]
    for said, state, words in wrong:
        with pytest.raises(ConfigError, match=words):
            start(FedLoRA(**{"server": "glora", "clients": 3, "r": 4, "lora_alpha": 16} | said), stock_grid(), 1, state)


def test_stock_clients_in_order_go_on_at_the_same_nodes_alone(tmp_path: Path) -> None:
    """To the bits of an unbroken run; and not where the ids are others, for data follow the node."""

    def made(folder: Path) -> FedLoRA:
        return FedLoRA("glora", 3, r=4, lora_alpha=16, folder=folder)

    whole = start(made(tmp_path / "whole"), stock_grid(), 2).arrays.to_torch_state_dict()
    start(made(tmp_path), stock_grid(), 1)
    others = stock_grid()
    others.nodes = {id + 1: node for id, node in others.nodes.items()}
    with pytest.raises(ConfigError, match="simulation"):
        start(made(tmp_path), others, 2)
    resumed = start(made(tmp_path), stock_grid(), 2).arrays.to_torch_state_dict()
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())


def test_the_app_to_copy_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    """examples/flower/app with its own clients, on this grid in place of a simulation; Flower takes its project."""
    from flwr.cli.config_utils import load_and_validate

    app = Path(__file__).parents[2] / "examples" / "flower" / "app"
    monkeypatch.syspath_prepend(str(app))
    from lora_app.client_app import train  # type: ignore[import-not-found, unused-ignore]
    from lora_app.task import CLIENTS, model  # type: ignore[import-not-found, unused-ignore]
    from peft import get_peft_model_state_dict

    class Client:
        def __init__(self, partition: int) -> None:
            self.context = SimpleNamespace(node_config={"partition-id": partition})

        def work(self, record: RecordDict) -> RecordDict:
            return train(Message(record, 7, "train"), self.context).content  # type: ignore[no-any-return]

    grid = LocalGrid({f"node-{k}": Client(k) for k in range(CLIENTS)})  # type: ignore[misc]
    result = start(FedLoRA("glora", CLIENTS, r=4, lora_alpha=8), grid, 2, get_peft_model_state_dict(model()))
    losses = [metrics["train_loss"] for metrics in result.train_metrics_clientapp.values()]
    assert losses[1] < losses[0] / 2
    assert load_and_validate(app / "pyproject.toml")


def test_the_pages_server_plays_and_its_whole_model_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """docs/how-to/flower.md, its blocks for mixed ranks: method, ranks and quorum fit together. Of flora, whose next
    start is a fresh pair, a warning says that arrays lack the model, and the written adapter has the server's update.
    """
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "flower.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    begin, write = (next(b for b in blocks if text in b) for text in ("strategy = FedLoRA(", "write_adapter("))
    names: dict[str, Any] = {
        "seed_adapter": seed_adapter(8),
        "spec": AdapterSpec({"base_model_name_or_path": "org/model"}),
    }
    exec(begin.replace("/srv/my-app", str(tmp_path)), names)
    strategy = names["strategy"]
    nodes = {name: Node(name, Toy(), tmp_path / name) for name in strategy.policy.clients}
    result = start(strategy, LocalGrid(nodes), 1)
    assert "not the whole model" in caplog.text
    assert not any(t.any() for name, t in result.arrays.to_torch_state_dict().items() if "lora_B" in name)
    exec(write.replace("/srv/my-app", str(tmp_path)), names)
    written = read_adapter(tmp_path / "adapter")[0].modules
    wanted = strategy.server.global_update(strategy.state.server)
    assert {*written} == {*wanted} and any(lora.norm() for lora in wanted.values())
    for name, lora in wanted.items():
        torch.testing.assert_close(written[name].delta(), lora.delta())


@pytest.mark.parametrize("measure", [0.0, 1.0])
def test_a_node_that_comes_back_under_another_id_gives_no_client_anothers_history(measure: float) -> None:
    """Stock clients follow their node: once the ids differ from those before, the order would swap clients. It moves
    once all have been asked to train; the next to be refused are measurements, or round 2."""
    grid, strategy = stock_grid(), FedLoRA("glora", 3, r=4, lora_alpha=16, fraction_evaluate=measure)

    def moves(asked: Message, reply: Message) -> Message:
        grid.nodes[9999] = grid.nodes.pop(min(grid.nodes))
        return reply

    grid.meddle = {"three": moves}
    with pytest.raises(ConfigError, match="other ids"):
        start(strategy, grid, 2)
    assert strategy.round == 1
