"""A fixed alpha and rsLoRA: each client's own scale alpha / r or alpha / sqrt(r).

Kind of evidence: *oracle* - stock peft with that LoraConfig, on the same model, stepped by a plain torch loop.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification

from fedlora import Adapter
from fedlora.training.encode import collate
from fedlora.training.loop import LocalTrainer
from fedlora.training.settings import TrainSettings
from support.local_training import Loader, download
from support.training_data import classification

ALPHA = 6
PREFIX = "base_model.model."


def stock(path: Path, adapter: Adapter, rank: int, rslora: bool) -> Any:
    """Plain peft at that alpha, begun with the adapter's A, its heads, and B = 0."""
    base = AutoModelForSequenceClassification.from_pretrained(path, num_labels=3)
    lora = {"target_modules": ["query", "value"], "task_type": "SEQ_CLS"}
    network = get_peft_model(base, LoraConfig(r=rank, lora_alpha=ALPHA, use_rslora=rslora, **lora))  # type: ignore[arg-type]
    with torch.no_grad():
        for name, one in adapter.modules.items():
            network.get_submodule(PREFIX + name).lora_A["default"].weight.copy_(one.factors[1])
        for name, head in adapter.heads.items():
            module, _, own = name.rpartition(".")
            getattr(network.get_submodule(PREFIX + module).modules_to_save["default"], own).copy_(head)
    return network.eval()  # no dropout anywhere, as the loaded model


@pytest.mark.parametrize(("rank", "rslora"), [(6, False), (4, True)])
def test_a_client_trains_as_stock_peft_does(load: Loader, classifier: Path, rank: int, rslora: bool) -> None:
    """Five steps of Adam on the same batches: the same A and effective updates. Adapters travel in units of B A = Delta
    W, so the trained B is s = alpha / r or alpha / sqrt(r) times peft's."""
    settings = TrainSettings(learning_rate=1e-2, max_steps=5, batch_size=4)
    model = load(lora={"lora_alpha": float(ALPHA), "use_rslora": rslora})
    adapter, _ = model.seed_adapter(rank, seed=3)
    trainer = LocalTrainer(model, {"a": classification(16, 1)}, settings, seed=2)
    got = trainer.train(download(adapter), adapter, 0).adapter

    network, order, data = stock(classifier, adapter, rank, rslora), trainer.order("a", 0), trainer.examples("a")
    parameters = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=settings.learning_rate)
    for _ in range(settings.max_steps):
        batch = collate([data[next(order)] for _ in range(settings.batch_size)], model.tokenizer, torch.device("cpu"))
        network(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    for name, lora in got.modules.items():
        layer = network.get_submodule(PREFIX + name)
        assert layer.scaling["default"] == pytest.approx(ALPHA / (math.sqrt(rank) if rslora else rank))
        want = layer.get_delta_weight("default").detach()
        assert want.norm() > 1e-3
        torch.testing.assert_close(lora.delta(), want, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(lora.factors[1], layer.lora_A["default"].weight.detach())
