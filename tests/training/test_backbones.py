"""The presets' larger backbones on tiny random weights: Qwen2 and Gemma-2 with grouped queries, v is not square.

Kind of evidence: end-to-end, with dense oracles. The real 7B and 9B models need a GPU and a hub.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForSequenceClassification, Qwen2Config, Qwen2ForSequenceClassification

from fedlora import Client, Upload, build, send
from fedlora.analysis.audit import mean_update, relative_difference
from fedlora.client import receive
from fedlora.server.server import Server
from fedlora.training.loop import LocalTrainer
from fedlora.training.models import AdaptedModel
from fedlora.training.settings import LoRASettings, TrainSettings
from support.known_warnings import FUTURE_NAMES, NOT_ON_THE_HUB
from support.training_data import classification, tokenizer

pytestmark = [FUTURE_NAMES, NOT_ON_THE_HUB]
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "num_labels": 3, "pad_token_id": 0,
}  # fmt: skip
BACKBONES = {
    "Qwen2-7B": lambda: Qwen2ForSequenceClassification(Qwen2Config(**SIZES)),
    "Gemma-2-9B": lambda: Gemma2ForSequenceClassification(Gemma2Config(**SIZES, head_dim=16)),
}


@pytest.fixture(params=BACKBONES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> AdaptedModel:
    torch.manual_seed(0)
    BACKBONES[request.param]().save_pretrained(tmp_path)
    tokenizer(classifies=True).save_pretrained(tmp_path)
    settings = LoRASettings(targets=["q_proj", "v_proj"])
    return AdaptedModel.load(tmp_path, "classification", settings, labels=("blue", "green", "red"), seed=0)


@pytest.mark.parametrize("name", ["fedit", "ffa-lora", "fedex-lora", "glora"])
def test_a_round_on_grouped_queries(model: AdaptedModel, name: str) -> None:
    """v_proj is not square (2 of 4 heads); two clients train, and exact methods hit the dense mean of their updates."""
    seed, _ = model.seed_adapter(4, seed=0)
    shapes = {tuple(x.delta().shape) for x in seed.modules.values()}
    assert len(shapes) == 2 and any(d_out != d_in for d_out, d_in in shapes)
    assert any(path.startswith("score") for path in seed.heads)
    server = Server(build(name))
    state = server.init(seed)
    parts = {c: classification(12, k) for k, c in enumerate("ab")}
    trainer = LocalTrainer(model, parts, TrainSettings(lr=1e-2, steps=2, batch_size=4, max_length=16), seed=0)
    uploads, whole = [], []
    for client in (Client("a", 4), Client("b", 4)):
        download = server.download(state, client)
        trained = trainer.train(download, receive(download, None), 0)
        assert trained.loss == trained.loss
        whole.append(Upload(client, trained.num_examples, trained.adapter))
        uploads.append(Upload(client, trained.num_examples, send(trained.adapter, download.roles)))
    after = server.aggregate(state, uploads)
    error = relative_difference(server.global_update(after), mean_update(whole, {"a": 0.5, "b": 0.5}))
    assert error > 1e-4 if name == "fedit" else error < 1e-5
