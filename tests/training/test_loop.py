"""Local training on tiny transformers (no network).

Kinds of evidence: *end-to-end* (real transformers and peft on models saved to disk and loaded again), *oracle* (losses,
steps and logits by hand from the formula, on a dense copy of the model), *contract* (same bits twice, nothing leaks).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fedlora.training.loop
from fedlora import Adapter, Client, Roles, Server, build
from fedlora.data import TextData
from fedlora.errors import ConfigError
from fedlora.server.server import start
from fedlora.simulation import simulate
from fedlora.training.encode import collate, encode
from fedlora.training.loop import LocalTrainer, optimizer_for
from fedlora.training.measure import ModelEvaluator
from fedlora.training.models import AdaptedModel
from fedlora.training.settings import LoRASettings, TrainSettings
from support.local_training import Loader, Recorder, base_weights, bits, dense, distance, download, drawn, logits, same
from support.tiny_models import llama
from support.training_data import EOS, classification, instructions, tokenizer, word


def trained(model: AdaptedModel, adapter: Adapter, data: TextData | None = None, **settings: Any) -> Any:
    """The first round of the client "a", by default with eight examples."""
    part = classification(8, 0) if data is None else data
    return LocalTrainer(model, {"a": part}, TrainSettings(**settings), seed=0).train(download(adapter), adapter, 0)


# ---- a client's round is a function of its arguments -----------------------------------------------------------------

DROPOUT = {"dropout": 0.2, "lora": {"lora_dropout": 0.3}}


@pytest.mark.parametrize("method", ["glora", "fedex-lora"])
def test_one_client_alone_reproduces_its_round_bitwise(load: Loader, method: str) -> None:
    """On a fresh copy of the model, in a process that has only that client's data, with dropout."""
    data = {name: classification(12, seed) for seed, name in enumerate(("a", "b", "c"))}
    ranks = {"a": 2, "b": 4, "c": 4} if method == "glora" else dict.fromkeys(data, 4)
    settings = TrainSettings(learning_rate=1e-2, max_steps=3, batch_size=5)
    model = load(**DROPOUT)
    recorder = Recorder(LocalTrainer(model, data, settings, seed=7))
    server = Server(build(method))
    seed_adapter, _ = model.seed_adapter(4, seed=7)
    clients = [Client(name, rank) for name, rank in ranks.items()]
    list(simulate(server, clients, recorder, start(server, seed_adapter), rounds=2))
    assert len(recorder.calls) == 6

    for call in (recorder.calls[5], recorder.calls[1]):  # c in the second round, b in the first
        asked, adapter, position, trained = call
        name = asked.client.id
        alone = LocalTrainer(load(**DROPOUT), {name: data[name]}, settings, seed=7)
        again = alone.train(asked, adapter, position)
        assert bits(again.adapter) == bits(trained.adapter)
        assert (again.loss, again.position, again.num_examples) == (trained.loss, trained.position, 12)
    with pytest.raises(ConfigError, match=r"client 'c' .*no training data"):
        alone.train(recorder.calls[5][0], adapter, 0)


def test_dropout_is_drawn_anew_for_each_round_client_and_seed(load: Loader) -> None:
    """Two steps over eight examples in batches of eight see the same batches in any order: dropout alone differs."""
    model, data = load(**DROPOUT), classification(8, 0)
    adapter, _ = model.seed_adapter(4, seed=0)
    settings = TrainSettings(learning_rate=1e-2, max_steps=2, batch_size=8)
    trainer = LocalTrainer(model, {"a": data, "b": data}, settings, seed=0)
    first, other_round, other_client = (
        trainer.train(download(adapter, client, t), adapter, 0).adapter for client, t in (("a", 0), ("a", 1), ("b", 0))
    )
    other_seed = LocalTrainer(model, {"a": data}, settings, seed=1).train(download(adapter), adapter, 0).adapter
    assert all(distance(other, first) > 1e-4 for other in (other_round, other_client, other_seed))


# ---- the order of the data -------------------------------------------------------------------------------------------


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The token ids of every example in the order in which training takes them."""
    examples: list[tuple[int, ...]] = []

    def recording(rows: Sequence[Mapping[str, Any]], *args: Any) -> Any:
        examples.extend(tuple(row["input_ids"]) for row in rows)
        return collate(rows, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(fedlora.training.loop, "collate", recording)
    return examples


def test_the_data_go_on_across_rounds_and_no_epoch_repeats_an_example(load: Loader, seen: list) -> None:
    """Ten examples, eight a round: each epoch takes every one once, in an order of its own and of the client's, and the
    rounds that a client misses take nothing from its data."""
    data = dict.fromkeys("ab", classification(10, 0))
    everything = sorted(tuple(e["input_ids"]) for e in encode(data["a"], tokenizer(classifies=True), max_length=16))
    model = load()
    adapter, _ = model.seed_adapter(4, seed=0)
    trainer = LocalTrainer(model, data, TrainSettings(max_steps=2, batch_size=4), seed=0)
    order: dict[str, list[tuple[int, ...]]] = {}
    for name, client, rounds in (("a", "a", range(5)), ("a missing some", "a", (0, 4, 5, 7, 9)), ("b", "b", range(5))):
        seen.clear()
        for k, t in enumerate(rounds):
            assert trainer.train(download(adapter, client, t), adapter, 8 * k).position == 8 * (k + 1)
        order[name] = list(seen)
    epochs = [order["a"][k : k + 10] for k in range(0, 40, 10)]
    assert all(sorted(epoch) == everything for epoch in epochs) and len({tuple(epoch) for epoch in epochs}) == 4
    assert order["a missing some"] == order["a"] and order["b"][:10] not in epochs


def test_steps_or_epochs_say_how_many_examples_a_round_takes(load: Loader, seen: list) -> None:
    """The weight is how much data a client has, not how much it took."""
    model = load()
    adapter, _ = model.seed_adapter(4, seed=0)
    for count, settings, examples in (
        (10, {"max_steps": 3, "batch_size": 4}, 12),
        (3, {"max_steps": 2, "batch_size": 8}, 6),  # fewer examples than a batch: all of them a step
        (10, {"max_steps": -1, "num_train_epochs": 1.0, "batch_size": 4}, 12),  # ceil(10 / 4) = 3 steps
        (10, {"max_steps": -1, "num_train_epochs": 2.0, "batch_size": 5}, 20),
        (10, {"max_steps": -1, "num_train_epochs": 0.5, "batch_size": 4}, 8),  # ceil(5 / 4) = 2 steps
    ):
        seen.clear()
        done = trained(model, adapter, classification(count, 0), **settings)  # type: ignore[arg-type]
        assert (done.position, len(seen), done.num_examples) == (examples, examples, count)


# ---- roles, ranks, memory --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("roles", [Roles(B="frozen"), Roles(A="frozen", B="local", heads="frozen")], ids=str)
def test_frozen_parts_keep_their_bits_and_all_others_train(load: Loader, roles: Roles) -> None:
    """Shared and local parts train; frozen ones have no gradient; the base model has none at all."""
    model = load()
    seed_adapter, _ = model.seed_adapter(4, seed=0)
    adapter = drawn(seed_adapter, 4, 1)
    untouched = base_weights(model)
    trainer = LocalTrainer(
        model, {"a": classification(8, 0)}, TrainSettings(learning_rate=1e-2, max_steps=3, batch_size=4), seed=0
    )
    after = trainer.train(download(adapter, roles=roles), adapter, 0).adapter

    for name, lora in adapter.modules.items():
        for factor, before in lora.tensors().items():
            frozen = getattr(roles, factor) == "frozen"
            assert torch.equal(after.modules[name].tensors()[factor], before) == frozen, (name, factor)
    for name, head in adapter.heads.items():
        assert torch.equal(after.heads[name], head) == (roles.heads == "frozen"), name
    assert same(base_weights(model), untouched)
    on = {name for name, p in model.network.named_parameters() if p.requires_grad}
    for part, mark in (("B", ".lora_B."), ("A", ".lora_A."), ("heads", ".modules_to_save.")):
        assert any(mark in name for name in on) == (getattr(roles, part) != "frozen")
    assert all(any(mark in name for mark in (".lora_B.", ".lora_A.", ".modules_to_save.")) for name in on)


# ---- one step, by hand -----------------------------------------------------------------------------------------------


def test_the_loss_of_a_language_model_is_on_the_responses_only(
    load_language_model: Loader, language_model: Path
) -> None:
    """Oracle: -log p(token | all before it), the mean over the tokens of the responses and their end tokens."""
    data = instructions(5, 0)
    model = load_language_model()
    adapter, _ = model.seed_adapter(4, seed=0)
    loss = trained(model, adapter, data, max_steps=1, batch_size=5, max_length=16, chat_template="{prompt}").loss
    plain, losses = dense(language_model, llama, {}, {}), []
    for prompt, response in zip(data.text, data.responses or (), strict=True):
        before = [word(int(w[1:])) for w in prompt.split()]
        after = [*(word(int(w[1:])) for w in response.split()), EOS]
        scores = logits(plain, before + after).double().log_softmax(-1)
        losses += [-float(scores[len(before) - 1 + k, token]) for k, token in enumerate(after)]
    assert loss == pytest.approx(math.fsum(losses) / len(losses), rel=1e-4)


def test_gradient_accumulation_equals_one_big_batch(load: Loader) -> None:
    """As in transformers, batch_size times gradient_accumulation_steps. Also where the batches are of different sizes
    (a client of 8 examples has 3, 3 and 2)."""
    model = load()
    adapter = drawn(model.seed_adapter(4, seed=0)[0], 4, 1)
    settings = {"learning_rate": 0.1, "optimizer": "sgd", "max_steps": 2, "max_grad_norm": 0.05}
    data = classification(8, 0, skew=1)
    whole, parts = (
        trained(model, adapter, data, batch_size=b, gradient_accumulation_steps=k, **settings)
        for b, k in ((8, 1), (3, 3))
    )
    assert distance(parts.adapter, whole.adapter) < 1e-5
    assert parts.loss == pytest.approx(whole.loss, rel=1e-5)
    assert distance(whole.adapter, adapter) > 1e-3, "the steps were not tiny"


def test_the_optimiser_and_its_learning_rate_are_the_ones_named() -> None:
    """A new one for each round; the factors by hand: of 4 rounds, linear and half a cosine."""
    for name, kind in (("sgd", torch.optim.SGD), ("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam)):
        made = optimizer_for([torch.nn.Parameter(torch.ones(1))], TrainSettings(optimizer=name, weight_decay=0.5), 0)
        assert type(made) is kind and made.defaults["weight_decay"] == 0.5
    for schedule, factors in (("linear", (1, 3 / 4, 1 / 2, 1 / 4)), ("cosine", (1, (1 + 0.5**0.5) / 2, 1 / 2))):
        settings = TrainSettings(learning_rate=0.5, lr_scheduler_type=schedule, rounds=4)
        for k, factor in enumerate(factors):
            made = optimizer_for([torch.nn.Parameter(torch.ones(1))], settings, k)
            assert made.param_groups[0]["lr"] == pytest.approx(0.5 * factor)
    with pytest.raises(ConfigError, match=r"rounds = 4.* round 5"):
        optimizer_for([], settings, 4)


def test_clipping_bounds_the_norm_of_the_whole_gradient(load: Loader) -> None:
    """Adapter and heads together, as one vector: with SGD and lr = 1 a step is the clipped gradient."""
    model = load()
    adapter = drawn(model.seed_adapter(4, seed=0)[0], 4, 1)
    lengths = []
    for clip in (0.0, 0.05):
        after = trained(
            model, adapter, learning_rate=1.0, optimizer="sgd", max_steps=1, batch_size=8, max_grad_norm=clip
        ).adapter
        moved = [after.heads[n] - h for n, h in adapter.heads.items()]
        for n, lora in adapter.modules.items():
            moved += [after.modules[n].tensors()[f] - t for f, t in lora.tensors().items()]
        lengths.append(math.sqrt(math.fsum(float(m.double().square().sum()) for m in moved)))
    assert lengths[0] > 0.1
    assert lengths[1] == pytest.approx(0.05, rel=1e-3)


def test_bf16_autocast_computes_narrow_and_keeps_float32_factors(load: Loader) -> None:
    """Near the float32 result, but not equal to it; what is trained and sent stays float32."""
    model = load()
    adapter, _ = model.seed_adapter(4, seed=0)
    exact, narrow = (
        trained(model, adapter, learning_rate=1e-2, max_steps=2, batch_size=4, bf16=bf16) for bf16 in (False, True)
    )
    assert narrow.loss != exact.loss
    assert narrow.loss == pytest.approx(exact.loss, rel=2e-2)
    assert all(t.dtype == torch.float32 for x in narrow.adapter.modules.values() for t in x.factors)


def test_what_a_model_cannot_do_is_said_before_training(classifier: Path) -> None:
    """The tiny BERT has 16 positions (tests/support/tiny_models.py); 20 words with [CLS] and [SEP] are 22 tokens."""
    lora = LoRASettings(target_modules=["query"])
    model = AdaptedModel.load(classifier, "sequence-classification", lora, labels=("a", "b", "c"))
    data = {"x": TextData("classification", (" ".join(["w1"] * 20),), labels=(0,), label_names=("a", "b", "c"))}
    with pytest.raises(ConfigError, match=r"22 tokens, .*16 positions"):
        LocalTrainer(model, data, TrainSettings(max_length=64), seed=0)
    with pytest.raises(ConfigError, match=r"22 tokens, .*16 positions"):
        ModelEvaluator(model, data["x"], [], max_length=64)
    LocalTrainer(model, data, TrainSettings(max_length=16), seed=0)
    with pytest.raises(ConfigError, match=r"labels; got \['only'\]"):
        AdaptedModel.load(classifier, "sequence-classification", lora, labels=("only",))
    with pytest.raises(ConfigError, match=r"^TrainSettings: max_steps.*; got 0"):
        TrainSettings(max_steps=0)
    with pytest.raises(ConfigError, match=r"learning_rate.*; got inf"):
        TrainSettings(learning_rate=math.inf)
    with pytest.raises(ConfigError, match=r"lora\.lora_alpha = 8 and lora\.scaling = 2 contradict"):
        LoRASettings(lora_alpha=8.0, scaling=2.0)
    with pytest.raises(ConfigError, match=r"lora_alpha, or lora\.scaling without"):
        LoRASettings(use_rslora=True)
