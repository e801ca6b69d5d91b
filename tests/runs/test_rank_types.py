"""Clients whose attention and feed-forward modules have different ranks, and uploads that are kept, in a whole run.
Tiny transformers.

Kinds of evidence: *end-to-end* (`clients.ranks` with two ranks, on all linear layers, to what is uploaded and written
and what peft loads of it) and *oracle* (ranks by lists of module names, bytes by shapes).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlora import read_adapter
from fedlora.training.loop import LocalTrainer
from support.local_training import bits
from support.peft_models import peft_layers, peft_updates
from support.projects import configured, peft_model, ran

# tiny_models.bert: each linear layer with (d_out, d_in), by kind; the classifier is no LoRA target but a head.
LAYER = "bert.encoder.layer.0"
ATTENTION = {f"{LAYER}.attention.{m}": (32, 32) for m in ("self.query", "self.key", "self.value", "output.dense")}
FEED_FORWARD = {
    f"{LAYER}.intermediate.dense": (48, 32), f"{LAYER}.output.dense": (32, 48), "bert.pooler.dense": (32, 32),
}  # fmt: skip
SHAPES = ATTENTION | FEED_FORWARD
TYPES = "clients.ranks=[{attention = 2, feed_forward = 3}, 4, {attention = 5, feed_forward = 2}]"
RANKS = {"site-1": (2, 3), "site-2": (4, 4), "site-3": (5, 2)}  # attention, feed-forward


def by_module(attention: int, feed_forward: int) -> dict[str, int]:
    return dict.fromkeys(ATTENTION, attention) | dict.fromkeys(FEED_FORWARD, feed_forward)


@pytest.mark.parametrize("method", ["glora", "ffa-lora"])
def test_every_module_has_its_clients_own_rank_from_training_to_peft(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Ranks by the lists above, in manifest, card, training, uploads and readouts. A kept upload is what the real
    trainer made, bit for bit, heads and ffa-lora's frozen factor included. Bytes, in float32: 4 (d_out + d_in) r for
    each module; of ffa-lora B alone, but for A down in the first round. peft: its own layers, and scaling * B A."""
    train, made = LocalTrainer.train, {}

    def kept(self: LocalTrainer, download: Any, adapter: Any, position: int) -> Any:
        made[download.round + 1, download.client.id] = found = train(self, download, adapter, position)
        assert adapter.ranks == by_module(*RANKS[download.client.id])
        return found

    monkeypatch.setattr(LocalTrainer, "train", kept)
    sets = ("lora.target_modules=all-linear", TYPES, "run.rounds=2", "run.keep_uploads=all", "run.readouts=true")
    folder = ran(configured(project, *sets, f"method.name={method}", "train.optimizer=sgd"), tmp_path / "run")
    manifest = folder.read_json("manifest.json")
    assert manifest["clients"] == {"site-1": "2/3", "site-2": 4, "site-3": "5/2"} and len(made) == 6
    assert "site-1: 2/3, site-2: 4, site-3: 5/2" in (folder.path / "adapter" / "README.md").read_text()
    for (t, client), trained in made.items():
        stored = folder.uploads(t) / client
        assert bits(read_adapter(stored, scaling=2.0)[0]) == bits(trained.adapter) and trained.adapter.heads
        facts = {"client": client, "num_examples": manifest["data"]["train"][client]["examples"], "round": t}
        assert json.loads((stored / "upload.json").read_text()) == facts
    entries = [(r, *SHAPES[name]) for ranks in RANKS.values() for name, r in by_module(*ranks).items()]
    whole, b_only = sum(4 * r * (b + a) for r, b, a in entries), sum(4 * r * b for r, b, _ in entries)
    for line in folder.metrics():
        assert line["bytes"]["up_adapter"] == (b_only if method == "ffa-lora" else whole)
        assert line["bytes"]["down_adapter"] == (b_only if method == "ffa-lora" and line["round"] > 1 else whole)
    for client, ranks in RANKS.items():
        for directory in (folder.uploads(2) / client, folder.path / "clients" / client):
            model, (adapter, spec) = peft_model(project, directory), read_adapter(directory, scaling=2.0)
            assert {name: layer.r["default"] for name, layer in peft_layers(model).items()} == by_module(*ranks)
            assert spec.scaling == 2.0
            for name, update in peft_updates(model).items():
                torch.testing.assert_close(update, 2.0 * adapter.modules[name].delta(), rtol=0, atol=1e-6)
