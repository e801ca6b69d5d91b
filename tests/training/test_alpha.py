"""A fixed alpha and rsLoRA: each client's own scale alpha / r or alpha / sqrt(r), and what the server averages.

Kind of evidence: *oracle* - stock peft with that LoraConfig, on the same model, stepped by a plain torch loop; dense
float64 sums for the server's mean.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from fedlora import Adapter, Client, Server, build
from fedlora.server.server import start
from fedlora.simulation import simulate
from fedlora.training.encode import collate
from fedlora.training.loop import LocalTrainer
from fedlora.training.models import AdaptedModel
from fedlora.training.settings import LoRASettings, TrainSettings
from support.known_warnings import FUTURE_NAMES
from support.local_training import Loader, download
from support.training_data import classification

pytestmark = FUTURE_NAMES

ALPHA, UNIT = 6.0, 1.0  # of a fixed alpha B A is Delta W itself
PREFIX = "base_model.model."


def fixed(rslora: bool = False) -> dict[str, Any]:
    return {"lora": {"lora_alpha": ALPHA, "use_rslora": rslora}}


def scale(rank: int, rslora: bool) -> float:
    return ALPHA / math.sqrt(rank) if rslora else ALPHA / rank


def stock(path: Path, adapter: Adapter, rank: int, rslora: bool) -> Any:
    """Plain peft at that alpha, begun with the adapter's A, its heads, and B = 0."""
    base = AutoModelForSequenceClassification.from_pretrained(path, num_labels=3)
    config = LoraConfig(
        r=rank, lora_alpha=int(ALPHA), use_rslora=rslora, target_modules=["query", "value"], task_type="SEQ_CLS"
    )
    network = get_peft_model(base, config)
    with torch.no_grad():
        for name, lora in adapter.modules.items():
            network.get_submodule(PREFIX + name).lora_A["default"].weight.copy_(lora.factors[1])
        for name, head in adapter.heads.items():
            path_, _, own = name.rpartition(".")
            getattr(network.get_submodule(PREFIX + path_).modules_to_save["default"], own).copy_(head)
    return network.eval()  # no dropout anywhere, as the loaded model


def stepped(network: Any, trainer: LocalTrainer, client: str, model: AdaptedModel, s: TrainSettings) -> None:
    """Plain torch: Adam on what requires a gradient, on the same batches."""
    order, data = trainer.order(client, 0), trainer.examples(client)
    parameters = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=s.learning_rate)
    for _ in range(s.max_steps):
        batch = collate([data[next(order)] for _ in range(s.batch_size)], model.tokenizer, torch.device("cpu"))
        network(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, s.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()


def updates(network: Any) -> dict[str, Tensor]:
    """Module -> peft's own s B A."""
    return {
        name.removeprefix(PREFIX): module.get_delta_weight("default").detach().double()
        for name, module in network.named_modules()
        if hasattr(module, "get_delta_weight")
    }


SETTINGS = TrainSettings(learning_rate=1e-2, max_steps=5, batch_size=4)


@pytest.mark.parametrize(("rank", "rslora"), [(6, False), (4, True)])
def test_a_client_trains_as_stock_peft_does(load: Loader, classifier: Path, rank: int, rslora: bool) -> None:
    """Five steps of Adam: the same effective updates s B A, A and heads, whatever unit adapters travel in."""
    model = load(**fixed(rslora))
    adapter, _ = model.seed_adapter(rank, seed=3)
    trainer = LocalTrainer(model, {"a": classification(16, 1)}, SETTINGS, seed=2)
    got = trainer.train(download(adapter), adapter, 0).adapter
    network = stock(classifier, adapter, rank, rslora)
    layer = next(m for m in network.modules() if hasattr(m, "get_delta_weight"))
    assert layer.scaling["default"] == pytest.approx(scale(rank, rslora))
    stepped(network, trainer, "a", model, SETTINGS)
    for name, want in updates(network).items():
        assert want.norm() > 1e-3
        torch.testing.assert_close(UNIT * got.modules[name].delta().double(), want, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(
            got.modules[name].A, network.get_submodule(PREFIX + name).lora_A["default"].weight.detach()
        )


def test_the_server_averages_effective_updates(load: Loader, classifier: Path) -> None:
    """Ranks 2 and 6 at one alpha: sum_i p_i (alpha / r_i) B_i A_i of two stock peft models, dense in float64."""
    data = {"a": classification(12, 1), "b": classification(20, 2)}
    model, ranks = load(**fixed()), {"a": 2, "b": 6}
    trainer = LocalTrainer(model, data, SETTINGS, seed=2)
    seed_adapter, _ = model.seed_adapter(6, seed=3)
    server = Server(build("flexlora"))
    clients = [Client(name, rank) for name, rank in ranks.items()]
    (record,) = simulate(server, clients, trainer, start(server, seed_adapter), rounds=1)
    want: dict[str, Tensor] = {}
    for client in clients:
        begun = server.download(server.init(seed_adapter), client).adapter
        network = stock(classifier, begun, ranks[client.id], rslora=False)
        stepped(network, trainer, client.id, model, SETTINGS)
        for name, update in updates(network).items():
            want[name] = want.get(name, torch.zeros(())) + len(data[client.id]) / 32 * update
    for name, lora in server.global_update(record.state.server).items():
        torch.testing.assert_close(UNIT * lora.delta().double(), want[name], rtol=1e-3, atol=2e-6)


def test_the_unit_is_the_scaling_or_one() -> None:
    """Of [lora] alone: a node that names its own rank must fold by the same unit as its server."""
    assert (LoRASettings(scaling=0.5).unit, LoRASettings(lora_alpha=16.0).unit) == (0.5, 1.0)
