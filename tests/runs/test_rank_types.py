"""Clients whose attention and feed-forward modules have different ranks, through whole runs. Tiny transformers.

Kinds of evidence: *end-to-end* (`clients.ranks` with two ranks, on all linear layers, to what
is uploaded and written and what peft loads of it) and *oracle* (ranks by lists of module names, bytes by shapes, the
server's update and its best approximations by dense float64 matrices).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedlora import read_adapter
from fedlora.runs.config import RunConfig
from fedlora.runs.folder import RunFolder
from fedlora.runs.preparation import prepare
from support.known_warnings import FUTURE_NAMES, NOT_ON_THE_HUB
from support.peft_models import peft_layers, peft_updates
from support.projects import configured, peft_model, ran
from support.recorded import Call, recording

pytestmark = [FUTURE_NAMES, NOT_ON_THE_HUB]

# tiny_models.bert: each linear layer with (d_out, d_in), by kind; the classifier is no LoRA target but a head.
LAYERS = ("bert.encoder.layer.0",)
ATTENTION = {
    f"{layer}.attention.{m}": (32, 32)
    for layer in LAYERS
    for m in ("self.query", "self.key", "self.value", "output.dense")
}
FEED_FORWARD = {
    **{f"{layer}.intermediate.dense": (48, 32) for layer in LAYERS},
    **{f"{layer}.output.dense": (32, 48) for layer in LAYERS},
    "bert.pooler.dense": (32, 32),
}
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


def played(config: RunConfig, out: Path) -> Finished:
    with recording() as calls:
        return Finished(config, ran(config, out), calls)


@pytest.fixture(scope="module", params=["glora", "ffa-lora"])
def typed(request: pytest.FixtureRequest, project: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Two rounds of three clients of three types on all linear layers. Tests read it and change nothing."""
    sets = (
        ALL_LINEAR,
        TYPES,
        "run.rounds=2",
        "run.keep_uploads=all",
        "run.readouts=true",
        "evaluate.clients_at_end=true",
    )
    config = configured(project, *sets, f"method.name={request.param}", "train.optimizer=sgd")
    return played(config, tmp_path_factory.mktemp("typed") / "run")


def test_every_module_is_trained_and_uploaded_at_its_clients_own_rank(typed: Finished) -> None:
    """Attention modules and all others by the two lists above, in both rounds."""
    assert len(typed.calls) == 6
    for call in typed.calls:
        want = by_module(*RANKS[call.client])
        assert call.received.ranks == call.trained.adapter.ranks == want
        stored = typed.uploads(call.round)[call.client].heads
        heads = call.trained.adapter.heads
        assert heads and all(torch.equal(stored[name], head) for name, head in heads.items()), "as they were trained"
    for round in (1, 2):
        uploads = typed.uploads(round)
        assert {client: adapter.ranks for client, adapter in uploads.items()} == {
            client: by_module(*ranks) for client, ranks in RANKS.items()
        }


def test_the_start_is_common_slot_by_slot(typed: Finished) -> None:
    """For each module the largest rank that any client has there. A client of fewer slots has its
    first ones, bit for bit; attention's widest client is site-3, the others' site-2."""
    assert prepare(typed.config).seed_adapter.ranks == by_module(5, 4)
    first = {call.client: call.received for call in typed.calls if call.round == 1}
    for name in SHAPES:
        widest = first["site-3" if name in ATTENTION else "site-2"].modules[name].factors[1]
        assert len({tuple(row.tolist()) for row in widest}) == len(widest)
        for adapter in first.values():
            B, A = adapter.modules[name].factors
            assert torch.equal(A, widest[: len(A)]) and not B.any()


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
            extra = typed.config.method.name == "flora" and directory.parent.name == "clients"  # with the base change
            assert set(at) == set(SHAPES) and (extra or at == by_module(*ranks))
            assert spec.scaling == 2.0
            for name, update in peft_updates(model).items():
                torch.testing.assert_close(update, 2.0 * adapter.modules[name].delta(), rtol=0, atol=1e-6)


def test_the_manifest_names_the_types_as_attention_and_feed_forward(typed: Finished) -> None:
    """As explanation/methods.md writes them: attention/feed-forward, one number where they are the same."""
    assert typed.folder.read_json("manifest.json")["clients"] == {"site-1": "2/3", "site-2": 4, "site-3": "5/2"}
    assert "site-1: 2/3, site-2: 4, site-3: 5/2" in (typed.folder.path / "adapter" / "README.md").read_text()
    assert set(typed.folder.read_json("summary.json")["clients_at_end"]) == set(RANKS)


def dense_mean(finished: Finished, round: int) -> dict[str, Tensor]:
    """sum_i p_i B_i A_i of the kept uploads, float64, p_i by the examples in the manifest."""
    examples = {c: p["examples"] for c, p in finished.folder.read_json("manifest.json")["data"]["train"].items()}
    total = sum(examples.values())
    uploads = finished.uploads(round)
    return {
        name: sum(examples[c] / total * a.modules[name].map(Tensor.double).delta() for c, a in uploads.items())
        for name in uploads["site-1"].modules
    }  # type: ignore[return-value]


def test_the_servers_model_is_the_dense_mean_of_the_uploads(typed: Finished) -> None:
    """Exact methods: adapter/ holds sum_i p_i B_i A_i of the last round, across ranks, in every module."""
    got, _ = read_adapter(typed.folder.path / "adapter", scaling=2.0)
    for name, mean in dense_mean(typed, 2).items():
        difference = got.modules[name].delta().double() - mean
        assert float(difference.norm()) < 1e-5 * float(mean.norm())


def test_where_only_attention_is_adapted_the_other_rank_does_not_matter(project: Path, tmp_path: Path) -> None:
    """The default targets are query and value, so {attention = 4, feed_forward = 9} is 4: in the uploads, the bytes by
    hand (two modules of 32 x 32) and the manifest."""
    sets = ("clients.ranks=[2, {attention = 4, feed_forward = 9}, 4]", "run.rounds=1", "run.keep_uploads=last")
    folder = ran(configured(project, *sets), tmp_path / "run")
    ranks = {path.name: set(read_adapter(path)[0].ranks.values()) for path in folder.uploads(1).iterdir()}
    assert ranks == {"site-1": {2}, "site-2": {4}, "site-3": {4}}
    assert folder.metrics()[0]["bytes"]["up_adapter"] == (2 + 4 + 4) * 2 * 64 * 4
    shown = folder.read_json("manifest.json")["clients"]
    assert {client: str(rank) for client, rank in shown.items()} == {"site-1": "2", "site-2": "4", "site-3": "4"}
