"""Clients whose attention and feed-forward modules have different ranks, through whole runs. Tiny transformers.

Kinds of evidence: *end-to-end* (`clients.ranks` with two ranks, on all linear layers, to what is uploaded and written
and what peft loads of it) and *oracle* (ranks by lists of module names, bytes by shapes).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlora import read_adapter
from fedlora.runs.config import RunConfig
from fedlora.runs.folder import RunFolder
from support.known_warnings import FUTURE_NAMES, NOT_ON_THE_HUB
from support.local_training import bits
from support.peft_models import peft_layers, peft_updates
from support.projects import configured, peft_model, ran
from support.recorded import Call, recording

pytestmark = [FUTURE_NAMES, NOT_ON_THE_HUB]

# tiny_models.bert: each linear layer with (d_out, d_in), by kind; the classifier is no LoRA target but a head.
LAYER = "bert.encoder.layer.0"
ATTENTION = {f"{LAYER}.attention.{m}": (32, 32) for m in ("self.query", "self.key", "self.value", "output.dense")}
FEED_FORWARD = {
    f"{LAYER}.intermediate.dense": (48, 32), f"{LAYER}.output.dense": (32, 48), "bert.pooler.dense": (32, 32),
}  # fmt: skip
SHAPES = ATTENTION | FEED_FORWARD
ALL_LINEAR = "lora.target_modules=all-linear"
TYPES = "clients.ranks=[{attention = 2, feed_forward = 3}, 4, {attention = 5, feed_forward = 2}]"
RANKS = {"site-1": (2, 3), "site-2": (4, 4), "site-3": (5, 2)}  # attention, feed-forward


def by_module(attention: int, feed_forward: int) -> dict[str, int]:
    return dict.fromkeys(ATTENTION, attention) | dict.fromkeys(FEED_FORWARD, feed_forward)


def numbers(ranks: Mapping[str, int]) -> int:
    """How many entries B and A have together."""
    return sum(r * sum(SHAPES[name]) for name, r in ranks.items())


@dataclass(frozen=True, eq=False)
class Finished:
    config: RunConfig
    folder: RunFolder
    calls: list[Call]

    def uploads(self, round: int) -> dict[str, Any]:
        directories = sorted(self.folder.uploads(round).iterdir())
        return {path.name: read_adapter(path, scaling=2.0)[0] for path in directories}


@pytest.fixture(scope="module", params=["glora", "ffa-lora"])
def typed(request: pytest.FixtureRequest, project: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Two rounds of three clients of three types on all linear layers. Tests read it and change nothing."""
    sets = (ALL_LINEAR, TYPES, "run.rounds=2", "run.keep_uploads=all", "run.readouts=true")
    config = configured(project, *sets, f"method.name={request.param}", "train.optimizer=sgd")
    with recording() as calls:
        return Finished(config, ran(config, tmp_path_factory.mktemp("typed") / "run"), calls)


def test_every_module_is_trained_and_uploaded_at_its_clients_own_rank(typed: Finished) -> None:
    """Attention modules and all others by the two lists above, in both rounds; the manifest and the card name them."""
    assert typed.folder.read_json("manifest.json")["clients"] == {"site-1": "2/3", "site-2": 4, "site-3": "5/2"}
    assert "site-1: 2/3, site-2: 4, site-3: 5/2" in (typed.folder.path / "adapter" / "README.md").read_text()
    assert len(typed.calls) == 6
    for call in typed.calls:
        want = by_module(*RANKS[call.client])
        assert call.received.ranks == call.trained.adapter.ranks == want and call.trained.adapter.heads


def test_a_kept_upload_is_what_the_client_trained(typed: Finished) -> None:
    """`Trained.adapter` of the real trainer bit for bit, heads and ffa-lora's frozen factor included, and beside it
    whose, of how many examples and of which round. That a round appears whole: tests/core/test_folders.py."""
    examples = {c: p["examples"] for c, p in typed.folder.read_json("manifest.json")["data"]["train"].items()}
    for call in typed.calls:
        assert bits(typed.uploads(call.round)[call.client]) == bits(call.trained.adapter)
        facts = json.loads((typed.folder.uploads(call.round) / call.client / "upload.json").read_text())
        assert facts == {"client": call.client, "num_examples": examples[call.client], "round": call.round}


def test_bytes_are_those_of_each_modules_rank(typed: Finished) -> None:
    """float32: 4 (d_out + d_in) r for each module of the lists. FFA-LoRA: B up, and A down in the first round only."""
    whole = sum(4 * numbers(by_module(*ranks)) for ranks in RANKS.values())
    b_only = sum(4 * r * SHAPES[n][0] for ranks in RANKS.values() for n, r in by_module(*ranks).items())
    ffa = typed.config.method.name == "ffa-lora"
    for line in typed.folder.metrics():
        assert line["bytes"]["up_adapter"] == (b_only if ffa else whole)
        assert line["bytes"]["down_adapter"] == (b_only if ffa and line["round"] > 1 else whole)


def test_peft_loads_the_uploads_and_readouts_at_those_ranks(typed: Finished, project: Path) -> None:
    """peft's own layers: r by the lists, and its update scaling * B A of the adapter that was read."""
    for client, ranks in RANKS.items():
        for directory in (typed.folder.uploads(2) / client, typed.folder.path / "clients" / client):
            model = peft_model(project, directory)
            adapter, spec = read_adapter(directory, scaling=2.0)
            at = {name: layer.r["default"] for name, layer in peft_layers(model).items()}
            assert at == by_module(*ranks) and spec.scaling == 2.0
            for name, update in peft_updates(model).items():
                torch.testing.assert_close(update, 2.0 * adapter.modules[name].delta(), rtol=0, atol=1e-6)
