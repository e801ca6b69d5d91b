"""Several clients trained at once. Kind of evidence: *oracle* - `LocalTrainer`, which trains them one after the other,
is the reference; both draw the same examples in the same order, so results agree to rounding. Without dropout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedlora import Client, LoRA, Roles, Server, build
from fedlora.client import receive
from fedlora.core.base_change import BaseChange
from fedlora.core.method import TailPenalty
from fedlora.core.trainer import Job
from fedlora.errors import ClientFailed, ConfigError
from fedlora.server.server import start
from fedlora.simulation import Together, simulate
from fedlora.training.grouped import GroupedTrainer
from fedlora.training.local import TrainSettings
from fedlora.training.models import AdaptedModel
from support.known_warnings import CONV1D, FUTURE_NAMES
from support.local_training import Loader, base_weights, bits, distance, download, drawn, same
from support.training_data import classification, instructions

pytestmark = [FUTURE_NAMES, CONV1D]

NAMES = ("a", "b", "c")
SETTINGS = TrainSettings(lr=1e-2, steps=4, batch_size=5, clip=0.5, template="none")


def jobs_for(model: AdaptedModel, ranks: Mapping[str, Any], **fields: Any) -> list[Job]:
    """Each client starts from factors of its own, somewhere in its data."""
    fresh, _ = model.seed_adapter(4, seed=0)
    adapters = {name: drawn(fresh, rank, seed, 0.1) for seed, (name, rank) in enumerate(ranks.items())}
    downloads = [download(adapters[name], name, **fields) for name in ranks]
    return [Job(down, receive(down, None), 3 * k) for k, down in enumerate(downloads)]


def assert_as_one_by_one(trainer: GroupedTrainer, jobs: list[Job], tolerance: float = 4e-5) -> None:
    """The same up to rounding of float32, which adaptive optimisers make larger: processors differ, up to
    2.5e-5 so far, and what the steps move is far more than the tolerance."""
    moved = 0.0
    for job, got in zip(jobs, trainer.train_group(jobs), strict=True):
        want = trainer.train(job.download, job.adapter, job.position)
        assert (got.num_examples, got.position) == (want.num_examples, want.position)
        assert got.adapter.ranks == want.adapter.ranks and set(got.adapter.heads) == set(want.adapter.heads)
        assert got.loss == pytest.approx(want.loss, rel=1e-4)
        assert distance(got.adapter, want.adapter) < tolerance
        moved = max(moved, distance(got.adapter, job.adapter))
    assert moved > 40 * tolerance  # the comparison is of something that happened


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_classifiers_of_equal_and_mixed_ranks(load: Loader, optimizer: Any, accumulation: int) -> None:
    data = {name: classification(12 + k, k) for k, name in enumerate(NAMES)}
    more = {"optimizer": optimizer, "weight_decay": 0.1, "accumulation": accumulation}
    model = load()
    trainer = GroupedTrainer(model, data, replace(SETTINGS, **more), seed=5)
    for ranks in ({"a": 4, "b": 4, "c": 4}, {"a": 2, "b": 4, "c": 1}):
        assert_as_one_by_one(trainer, jobs_for(model, ranks))


def test_language_models(load_language_model: Loader) -> None:
    """The loss is over each client's own response tokens, however many the others have."""
    data = {name: instructions(9, k) for k, name in enumerate(NAMES)}
    model = load_language_model()
    trainer = GroupedTrainer(model, data, replace(SETTINGS, accumulation=2), seed=5)
    assert_as_one_by_one(trainer, jobs_for(model, {"a": 4, "b": 2, "c": 3}))


def test_layers_that_store_their_weights_transposed(load: Loader, conv1d_model: Path) -> None:
    data = {name: instructions(9, k) for k, name in enumerate(NAMES)}
    lora = {"targets": ["c_attn"], "scaling": 2.0}
    model = load(conv1d_model, task="causal-lm", labels=(), lora=lora)
    assert_as_one_by_one(GroupedTrainer(model, data, SETTINGS, seed=5), jobs_for(model, {"a": 4, "b": 2, "c": 3}))


@pytest.mark.parametrize(
    "roles", [Roles(A="frozen"), Roles(B="frozen"), Roles(heads="frozen"), Roles(B="local", heads="local")], ids=str
)
def test_frozen_parts_stay_bit_for_bit(load: Loader, roles: Roles) -> None:
    data = {name: classification(10, k) for k, name in enumerate(NAMES)}
    model = load()
    trainer = GroupedTrainer(model, data, replace(SETTINGS, weight_decay=0.1), seed=5)
    jobs = jobs_for(model, {"a": 4, "b": 2, "c": 4}, roles=roles)
    assert_as_one_by_one(trainer, jobs)
    for job, trained in zip(jobs, trainer.train_group(jobs), strict=True):
        for name, lora in job.adapter.modules.items():
            for factor, role in (("B", roles.B), ("A", roles.A)):
                before, after = lora.tensors()[factor], trained.adapter.modules[name].tensors()[factor]
                assert torch.equal(before, after) == (role == "frozen"), (name, factor)
        for name, head in job.adapter.heads.items():
            assert torch.equal(head, trained.adapter.heads[name]) == (roles.heads == "frozen")


def test_clients_with_fewer_steps_stop_where_they_would_alone(load: Loader) -> None:
    """Epochs over 4, 11 and 25 examples in batches of 5: one (of 4), three and five steps. Adam's momentum would carry
    those that are done further, were they not read at their last step."""
    data = {name: classification(count, k) for k, (name, count) in enumerate(zip(NAMES, (4, 11, 25), strict=True))}
    model = load()
    trainer = GroupedTrainer(model, data, replace(SETTINGS, steps=0, epochs=1.0), seed=5)
    jobs = jobs_for(model, {"a": 4, "b": 4, "c": 4})
    assert_as_one_by_one(trainer, jobs)
    assert [t.position - j.position for j, t in zip(jobs, trainer.train_group(jobs), strict=True)] == [4, 15, 25]


def test_the_base_change_and_the_penalty_are_each_clients(load: Loader) -> None:
    data = {name: classification(10, k) for k, name in enumerate(NAMES)}
    model = load()
    fresh, _ = model.seed_adapter(2, seed=0)
    change = {
        name: BaseChange(
            LoRA(torch.ones(len(lora.factors[0]), 1), 0.01 * torch.ones(1, lora.factors[1].shape[1])), 1, ()
        )
        for name, lora in fresh.modules.items()
    }
    before = base_weights(model)
    trainer = GroupedTrainer(model, data, SETTINGS, seed=5)
    roles = Roles(penalty=TailPenalty(0.5, 0.3))
    assert_as_one_by_one(trainer, jobs_for(model, {"a": 4, "b": 2, "c": 3}, roles=roles, base=change))
    assert not same(before, base_weights(model))  # the base had moved, for both


def test_one_client_that_diverges_leaves_the_others_alone(load: Loader) -> None:
    data = {name: classification(10, k) for k, name in enumerate(NAMES)}
    model = load()
    trainer = GroupedTrainer(model, data, SETTINGS, seed=5)
    jobs = jobs_for(model, {"a": 4, "b": 4, "c": 4})
    bad = jobs[1].adapter.map(lambda t: t * 1e30)
    spoilt = [jobs[0], Job(download(bad, "b"), bad, jobs[1].position), jobs[2]]
    good, after = trainer.train_group(jobs), trainer.train_group(spoilt)
    assert not all(bool(torch.isfinite(lora.factors[0]).all()) for lora in after[1].adapter.modules.values())
    for k in (0, 2):
        assert distance(good[k].adapter, after[k].adapter) < 1e-6


def test_the_model_is_as_before_and_so_is_torchs_generator(load: Loader) -> None:
    data = {name: classification(10, k) for k, name in enumerate(NAMES)}
    model = load(dropout=0.2, lora={"dropout": 0.3})
    trainer = GroupedTrainer(model, data, SETTINGS, seed=5)
    jobs = jobs_for(model, {"a": 4, "b": 4, "c": 4})
    alone = trainer.train(jobs[0].download, jobs[0].adapter, 0)
    before = torch.random.get_rng_state()
    first = trainer.train_group(jobs)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert [bits(t.adapter) for t in trainer.train_group(jobs)] == [bits(t.adapter) for t in first]  # dropout is seeded
    assert bits(trainer.train(jobs[0].download, jobs[0].adapter, 0).adapter) == bits(alone.adapter)


def test_a_head_that_is_no_linear_layer_is_refused_and_the_model_restored(load: Loader) -> None:
    data = {name: classification(10, k) for k, name in enumerate(NAMES)}
    model = load(lora={"saved": ["LayerNorm"]})
    trainer = GroupedTrainer(model, data, SETTINGS, seed=5)
    jobs = jobs_for(model, {"a": 4, "b": 4, "c": 4})
    with pytest.raises(ConfigError, match=r"LayerNorm.*train\.together = 1"):
        trainer.train_group(jobs)
    assert not any("forward" in vars(module) for module in model.network.modules())
    trainer.train(jobs[0].download, jobs[0].adapter, 0)


@pytest.mark.parametrize("method", ["glora", "fedex-lora", "fedsa-lora", "hetlora"])
def test_a_whole_run_in_groups_of_two(load: Loader, method: str) -> None:
    """Five clients in groups of 2, 2 and 1, three rounds, against one by one: the same server states to rounding."""
    names = ["a", "b", "c", "d", "e"]
    data = {name: classification(10 + k, k) for k, name in enumerate(names)}
    model = load()
    trainer = GroupedTrainer(model, data, replace(SETTINGS, steps=2), seed=5)
    fresh, _ = model.seed_adapter(4, seed=0)
    server = Server(build(method))
    ranks = [4] * 5 if method in ("fedex-lora", "fedsa-lora") else [1, 2, 4, 4, 3]
    clients = [Client(name, rank) for name, rank in zip(names, ranks, strict=True)]
    runs = [
        list(simulate(server, clients, Together(trainer, k), start(server, fresh), rounds=3, participation=0.9))
        for k in (1, 2)
    ]
    for one, two in zip(*runs, strict=True):
        assert one.weights == two.weights and one.bytes == two.bytes
        assert one.losses == pytest.approx(two.losses, rel=1e-3)
        for client in clients:
            a, b = (server.download(record.state.server, client).adapter for record in (one, two))
            for name, lora in a.modules.items():
                for factor, tensor in lora.tensors().items():
                    if method != "glora":  # whose factors are canonical up to near-ties; its update is compared below
                        torch.testing.assert_close(b.modules[name].tensors()[factor], tensor, atol=2e-3, rtol=2e-2)
                if lora.B is not None and lora.A is not None:
                    torch.testing.assert_close(b.modules[name].delta(), lora.delta(), atol=2e-3, rtol=2e-2)


class Stumbling(GroupedTrainer):
    """Cannot train groups, and not `b`."""

    def train_group(self, jobs: Any) -> Any:
        raise RuntimeError("out of memory")

    def train(self, download: Any, adapter: Any, position: int) -> Any:
        if download.client.id == "b":
            raise RuntimeError("no b")
        return super().train(download, adapter, position)


def test_a_group_that_fails_is_trained_one_by_one_and_the_blame_falls_on_the_right_client(load: Loader) -> None:
    data = {name: classification(10, k) for k, name in enumerate(NAMES)}
    model = load()
    fresh, _ = model.seed_adapter(2, seed=0)
    trainer = Stumbling(model, data, replace(SETTINGS, steps=1), seed=0)
    clients = [Client(name, 2) for name in NAMES]
    server = Server(build("glora"), quorum=1)
    (record,) = simulate(server, clients, Together(trainer, 3), start(server, fresh), rounds=1)
    assert set(record.weights) == {"a", "c"} and record.refused == {"b": "RuntimeError: no b"}
    strict = Server(build("glora"))
    with pytest.raises(ClientFailed, match="no b"):
        list(simulate(strict, clients, Together(trainer, 3), start(strict, fresh), rounds=1))


def test_a_client_without_data_is_named(load: Loader) -> None:
    model = load()
    trainer = GroupedTrainer(model, {"a": classification(4, 0)}, SETTINGS, seed=0)
    with pytest.raises(ConfigError, match="'b' has no training data"):
        trainer.train_group(jobs_for(model, {"a": 4, "b": 4}))


def test_heads_deep_inside_a_saved_module(load: Loader) -> None:
    """A head of several layers, as RoBERTa's: paths below the saved module reach the layer that runs."""
    model = load(lora={"saved": ["pooler"]})
    adapter, _ = model.seed_adapter(4, seed=0)
    assert any(name.endswith("pooler.dense.weight") for name in adapter.heads)
    assert isinstance(model.head_layer("bert.pooler.dense"), nn.Linear)
    with pytest.raises(KeyError):
        model.head_layer("bert.encoder")
    data = {name: classification(10, k) for k, name in enumerate(NAMES)}
    assert_as_one_by_one(GroupedTrainer(model, data, SETTINGS, seed=5), jobs_for(model, {"a": 4, "b": 2, "c": 4}))
