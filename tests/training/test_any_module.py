"""Any nn.Module with a loss of its own: against hand-made autograd, and refusals. Kind: oracle, contract.

The oracles are dense: W0 + scaling * B @ A written out and differentiated by torch itself, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlora import Adapter, Client, LoRA, Server, build
from fedlora.core.lora import named_tensors
from fedlora.errors import ConfigError
from fedlora.simulation import simulate, start
from fedlora.training import AdaptedModel, LocalTrainer, LoRASettings, ModelEvaluator, TrainSettings
from fedlora.training.measure import client_model

IDS = ("a", "b", "c")
CLIENTS = [Client(name, 3) for name in IDS]
SGD = TrainSettings(learning_rate=0.1, optimizer="sgd", max_steps=1, batch_size=6, max_grad_norm=0.0)
Batch = tuple[Tensor, Tensor]


class Tiny(nn.Module):
    """Two linear layers, dropout and a head: x (n, 5) -> (n, 2)."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.drop, self.head = nn.Linear(5, 4), nn.Dropout(dropout), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.drop(torch.tanh(self.first(x))))
        return out


def seeded(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return make().to(dtype)


def examples(dtype: torch.dtype = torch.float32) -> dict[str, list[Batch]]:
    g = torch.Generator().manual_seed(4)
    x, y = torch.randn(18, 5, generator=g, dtype=dtype), torch.randint(0, 2, (18,), generator=g)
    return {name: list(zip(x[k::3], y[k::3], strict=True)) for k, name in enumerate(IDS)}


def loss(network: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(network(x), y)


def tiny(dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> AdaptedModel:
    return AdaptedModel(
        seeded(lambda: Tiny(dropout), dtype), LoRASettings(target_modules=["first"], modules_to_save=["head"])
    )


def trained(
    model: AdaptedModel, adapter: Adapter, settings: TrainSettings = SGD, name: str = "fedit", **data: Any
) -> Any:
    """One client's round of `name`, from `adapter`."""
    server = Server(build(name))
    download = server.download(server.init(adapter), Client("a", 3))
    data = data or examples(next(named_tensors(adapter))[1].dtype)
    return LocalTrainer(model, data, settings, loss=loss, seed=0).train(download, adapter, 0)


def some_adapter(model: AdaptedModel, rank: int = 3) -> Adapter:
    """One whose B is not zero."""
    adapter, _ = model.seed_adapter(rank, seed=0)
    g = torch.Generator().manual_seed(5)
    return Adapter(
        {
            name: LoRA(torch.randn(lora.factors[0].shape, generator=g, dtype=lora.factors[0].dtype), lora.A)
            for name, lora in adapter.modules.items()
        },
        adapter.heads,
    )


def by_hand(adapter: Adapter, network: nn.Module, data: list[Batch], scaling: float = 2.0) -> dict[str, Tensor]:
    """One SGD step of rate 0.1 on all examples, with the update written out as a dense matrix."""
    base = {name: p.detach() for name, p in network.named_parameters()}
    B, A = (t.clone().requires_grad_() for t in adapter.modules["first"].factors)
    W, b = (adapter.heads[f"head.{name}"].clone().requires_grad_() for name in ("weight", "bias"))
    x, y = torch.stack([x for x, _ in data]), torch.stack([y for _, y in data])
    hidden = torch.tanh(x @ (base["first.weight"] + scaling * B @ A).T + base["first.bias"])
    value = nn.functional.cross_entropy(hidden @ W.T + b, y)
    value.backward()
    leaves = {"B": B, "A": A, "W": W, "b": b}
    return {name: (t - 0.1 * t.grad).detach() for name, t in leaves.items() if t.grad is not None} | {"loss": value}


def test_one_step_is_that_of_hand_made_autograd() -> None:
    """float64, all of the client's six examples in one batch: to rounding."""
    model = tiny(dtype=torch.float64)
    adapter = some_adapter(model)
    want = by_hand(adapter, seeded(Tiny, torch.float64), examples(torch.float64)["a"])
    got = trained(model, adapter)
    B, A = got.adapter.modules["first"].factors
    for mine, theirs in (
        (B, want["B"]), (A, want["A"]), (got.adapter.heads["head.weight"], want["W"]),
        (got.adapter.heads["head.bias"], want["b"]), (torch.tensor(got.loss).double(), want["loss"].float().double()),
    ):  # fmt: skip
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)
    assert (got.num_examples, got.position) == (6, 6)


def test_a_measure_of_its_own_is_of_each_client_and_their_mean() -> None:
    """FedSA-LoRA with dropout in training: after a round each client's loss on the held-out set, without dropout, and
    on the dense model that it would begin its next round with."""
    model, server = tiny(dropout=0.3), Server(build("fedsa-lora"))
    trainer = LocalTrainer(model, examples(), SGD, loss=loss, seed=0)
    held = (torch.stack([x for x, _ in examples()["b"]]), torch.stack([y for _, y in examples()["b"]]))
    evaluator = ModelEvaluator(
        model, held, CLIENTS, target="clients",
        measure=lambda network, batch: {"nll": float(loss(network, batch))},  # type: ignore[arg-type]
    )  # fmt: skip
    begun = start(server, model.seed_adapter(3, seed=0)[0])
    (record,) = simulate(server, CLIENTS, trainer, begun, rounds=1, evaluator=evaluator)
    want = {}
    for client in CLIENTS:
        mine = client_model(server, record.state.server, client, record.state.clients[client.id])
        want[client.id] = float(by_hand(mine, seeded(Tiny), examples()["b"])["loss"].detach())
    assert {name: record.metrics[f"client/{name}/nll"] for name in IDS} == pytest.approx(want)
    assert record.metrics["nll"] == pytest.approx(sum(want.values()) / 3) and len(set(want.values())) == 3


def test_torchs_fused_encoder_does_not_go_past_lora() -> None:
    """In evaluation nn.TransformerEncoderLayer may call one kernel on the base weights; it must not."""
    layer = seeded(lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True))
    model = AdaptedModel(layer, LoRASettings(target_modules="all-linear"))
    assert set(model.seed_adapter(2, seed=0)[0].modules) == {"linear1", "linear2"}
    model.activate(some_adapter(model))
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model.network.eval()(x), model.network.train()(x))


def test_the_base_stays_as_it_is_whoever_trains() -> None:
    """Batch norm's running statistics are of the base: two clients one after the other leave them alone."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    model = AdaptedModel(seeded(make), LoRASettings(target_modules=["0"], modules_to_save=["2"]))
    before = {name: t.clone() for name, t in seeded(make).state_dict().items()}
    trained(model, model.seed_adapter(3, seed=0)[0])
    after = {name.replace("base_layer.", ""): t for name, t in model.network.state_dict().items()}
    for name in ("0.weight", "0.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked", "1.weight"):
        assert torch.equal(after[f"base_model.model.{name}"], before[name]), name


def test_a_layer_whose_weight_is_read_past_lora_is_no_target() -> None:
    """nn.MultiheadAttention reads out_proj.weight itself: its LoRA would never change. Nor is one trained in full."""

    def fresh() -> nn.Module:
        return nn.ModuleDict({"attention": nn.MultiheadAttention(5, 1), "head": nn.Linear(5, 2)})

    with pytest.raises(ConfigError, match=r"'attention.out_proj', a Non.* head"):
        AdaptedModel(fresh(), LoRASettings(target_modules=["out_proj", "head"]))
    model = AdaptedModel(fresh(), LoRASettings(target_modules="all-linear"))
    assert [*model.seed_adapter(1, seed=0)[0].modules] == ["head"]
    with pytest.raises(ConfigError, match="not both"):
        AdaptedModel(fresh(), LoRASettings(target_modules=["head"], modules_to_save=["head"]))
    with pytest.raises(ConfigError, match="'nothere' is not a module"):
        AdaptedModel(fresh(), LoRASettings(target_modules=["head"], modules_to_save=["nothere"]))
