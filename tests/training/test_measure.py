"""What is measured, and of whom, on tiny transformers (no network).

Kind of evidence: *oracle*. Accuracy and loss by hand, example by example and unpadded, from the logits of a plain model
with the dense update written into its weights: no peft, no batches, and none of the library's evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import sklearn.metrics
import torch
from torch import Tensor, nn

from fedlora import Adapter, Client, Server, build
from fedlora.data import TextData
from fedlora.errors import NoGlobalModel
from fedlora.server.server import start
from fedlora.simulation import RoundRecord, simulate
from fedlora.training.encode import IGNORED, Cut, encode
from fedlora.training.loop import LocalTrainer
from fedlora.training.measure import ModelEvaluator
from fedlora.training.models import AdaptedModel
from fedlora.training.settings import LoRASettings, TrainSettings
from support.local_training import Recorder, dense, drawn, logits
from support.tiny_models import bert, llama
from support.training_data import LABELS, classification, instructions, tokenizer

SCALING = 2.0
RANKS = {"a": 2, "b": 4, "c": 4}
DATA = {name: classification(10 + 5 * k, k) for k, name in enumerate(RANKS)}
TEST = classification(40, 100)
EQUAL = dict.fromkeys(RANKS, 4)


@pytest.fixture
def model(classifier: Path) -> AdaptedModel:
    """A fresh copy in memory, with LoRA dropout and BERT's own."""
    settings = LoRASettings(target_modules=["query", "value"], scaling=SCALING, lora_dropout=0.1)
    return AdaptedModel.load(classifier, "sequence-classification", settings, labels=LABELS)


def by_hand(network: nn.Module, data: TextData, *, max_length: int = 128) -> dict[str, float]:
    """Mean accuracy and cross entropy over the labels that count: one each, or the response's tokens. Of classes also
    what scikit-learn makes of the answers."""
    right, losses, said = [], [], []
    for example in encode(
        data, tokenizer(classifies=data.kind == "classification"), max_length=max_length, template="{prompt}"
    ):
        scores = logits(network, example["input_ids"]).double().log_softmax(-1)
        if data.kind == "classification":
            pairs = [(scores, example["labels"])]
        else:  # the token at k is predicted by what stands before it
            pairs = [(scores[k - 1], y) for k, y in enumerate(example["labels"]) if y != IGNORED]
        for row, label in pairs:
            losses.append(-float(row[label]))
            said.append(int(row.argmax()))
            right.append(said[-1] == label)
    scores = {"accuracy": sum(right) / len(right), "loss": math.fsum(losses) / len(losses)}
    if data.kind != "classification":
        return scores | {"perplexity": math.exp(scores["loss"])}
    return scores | {
        "macro_f1": float(sklearn.metrics.f1_score(data.labels, said, average="macro")),
    }


def played(model: AdaptedModel, method: str, ranks: Mapping[str, int]) -> tuple[Server, list[RoundRecord], Recorder]:
    """Two rounds on DATA."""
    server = Server(build(method), seed=3)
    recorder = Recorder(LocalTrainer(model, DATA, TrainSettings(learning_rate=2e-2, max_steps=4, batch_size=5), seed=3))
    clients = [Client(name, rank) for name, rank in ranks.items()]
    state = start(server, model.seed_adapter(4, seed=3)[0])
    return server, list(simulate(server, clients, recorder, state, rounds=2, seed=3)), recorder


def mean_head(record: RoundRecord, name: str) -> Tensor:
    """sum_i n_i h_i / sum_i n_i over the uploads, in float64."""
    total = sum(u.num_examples for u in record.uploads)
    parts = [u.num_examples / total * u.adapter.heads[name].double() for u in record.uploads]
    return torch.stack(parts).sum(0)


def exact_mean(record: RoundRecord, name: str) -> Tensor:
    """sum_i n_i B_i A_i / sum_i n_i, dense, in float64."""
    total = sum(u.num_examples for u in record.uploads)
    parts = [u.num_examples / total * u.adapter.modules[name].map(Tensor.double).delta() for u in record.uploads]
    return torch.stack(parts).sum(0)


# ---- the server ------------------------------------------------------------------------------------------------------


def test_the_server_is_the_base_plus_the_mean_update_with_the_mean_head(model: AdaptedModel, classifier: Path) -> None:
    """Clients of ranks 2, 4, 4. The mean of the uploaded updates is the test's own, not the server's."""
    server, records, _ = played(model, "glora", RANKS)
    record = records[-1]
    names = list(record.uploads[0].adapter.modules)
    updates = {name: (SCALING * exact_mean(record, name)).float() for name in names}
    heads = {name: mean_head(record, name).float() for name in record.uploads[0].adapter.heads}
    want = by_hand(dense(classifier, bert, updates, heads), TEST)
    clients = [Client(n, r) for n, r in RANKS.items()]
    got = ModelEvaluator(model, TEST, clients, batch_size=7).evaluate(server, record.state)
    assert got == pytest.approx(want, rel=1e-3)
    assert set(got) == {"accuracy", "macro_f1", "loss"}
    assert abs(got["loss"] - by_hand(dense(classifier, bert, {}, {}), TEST)["loss"]) > 0.01, "something was learnt"


def test_a_language_model_is_measured_on_the_tokens_of_its_responses(language_model: Path) -> None:
    """Teacher-forced: each token given the true ones before it."""
    settings = LoRASettings(target_modules=["q_proj", "v_proj"], scaling=SCALING)
    model = AdaptedModel.load(language_model, "causal-lm", settings)
    data = instructions(30, 2)
    seed_adapter, _ = model.seed_adapter(3, seed=0)
    trained = drawn(seed_adapter, 3, 1)
    server = Server(build("glora"))
    state = start(server, trained)  # a warm start: the server's update is this adapter
    updates = {name: SCALING * lora.delta() for name, lora in trained.modules.items()}
    want = by_hand(dense(language_model, llama, updates, {}), data, max_length=16)
    evaluator = ModelEvaluator(model, data, [], max_length=16, batch_size=8, template="{prompt}")
    assert evaluator.evaluate(server, state) == pytest.approx(want, rel=1e-3)


# ---- the clients -----------------------------------------------------------------------------------------------------


def clients_by_hand(
    classifier: Path, adapters: Mapping[str, Adapter], data: Callable[[str], TextData]
) -> dict[str, dict[str, float]]:
    scores = {}
    for client, adapter in adapters.items():
        updates = {name: SCALING * lora.delta() for name, lora in adapter.modules.items()}
        scores[client] = by_hand(dense(classifier, bert, updates, adapter.heads), data(client))
    return scores


def summary(scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {
        **{name: sum(s[name] for s in scores.values()) / len(scores) for name in scores["a"]},
        "worst": min(s["accuracy"] for s in scores.values()),
        **{f"client/{name}": s["accuracy"] for name, s in scores.items()},
    }


def test_clients_are_measured_with_what_they_kept(model: AdaptedModel, classifier: Path) -> None:
    """FedSA-LoRA: W0 + B_i mean(A) with client i's own head; B_i and head as it last trained them."""
    server, records, recorder = played(model, "fedsa-lora", EQUAL)
    last = {call[0].client.id: call[3] for call in recorder.calls}
    total = sum(t.num_examples for t in last.values())
    adapters = {}
    for client, mine in last.items():
        modules = {}
        for name, lora in mine.adapter.modules.items():
            A = torch.stack([t.num_examples / total * t.adapter.modules[name].factors[1] for t in last.values()]).sum(0)
            modules[name] = type(lora)(lora.factors[0], A)
        adapters[client] = Adapter(modules, mine.adapter.heads)
    scores = clients_by_hand(classifier, adapters, lambda _: TEST)
    assert len({round(s["loss"], 4) for s in scores.values()}) == 3, "the clients differ"
    clients = [Client(name, 4) for name in RANKS]
    with pytest.raises(NoGlobalModel, match="Evaluate the clients"):
        ModelEvaluator(model, TEST, clients).evaluate(server, records[-1].state)
    got = ModelEvaluator(model, TEST, clients, target="clients").evaluate(server, records[-1].state)
    assert got == pytest.approx(summary(scores), rel=1e-3)


def test_clients_are_measured_at_their_own_rank_on_their_own_text(model: AdaptedModel, classifier: Path) -> None:
    """GLoRA: each client's readout and the mean head; b and c have held-out text of their own, a has none."""
    server, records, _ = played(model, "glora", RANKS)
    own = {"b": classification(15, 201, skew=0), "c": classification(20, 202, skew=1)}
    clients = [Client(name, rank) for name, rank in RANKS.items()]
    state = records[-1].state
    adapters = {c.id: server.download(state.server, c).adapter for c in clients}
    assert {name: set(a.ranks.values()) for name, a in adapters.items()} == {"a": {2}, "b": {4}, "c": {4}}
    scores = clients_by_hand(classifier, adapters, lambda client: own.get(client, TEST))
    evaluator = ModelEvaluator(model, TEST, clients, target="clients", own=own)
    assert evaluator.evaluate(server, state) == pytest.approx(summary(scores), rel=1e-3)
    for client, score in evaluator.measure_clients(server, state).items():
        assert score == pytest.approx(scores[client], rel=1e-3)


def test_what_is_cut_is_counted(model: AdaptedModel) -> None:
    """By hand: 3 tokens are left of [CLS], five words and [SEP], in two of three texts."""
    texts = ("w1 w2 w3 w4 w5", "w5 w4 w3 w2 w1", "w1")
    data = TextData("classification", texts, labels=(0, 1, 0), label_names=LABELS)
    assert ModelEvaluator(model, data, [], max_length=3).cut() == {"read": Cut(3, 2, 8)}


def test_an_empty_set_counts_nowhere(model: AdaptedModel) -> None:
    """Beside another set; alone it has no scores but NaN."""
    server = Server(build("fedit"))
    state = start(server, model.seed_adapter(4, seed=0)[0])
    empty = TEST.select([])
    alone = ModelEvaluator(model, TEST, []).evaluate(server, state)
    assert ModelEvaluator(model, {"x": TEST, "y": empty}, []).evaluate(server, state) == alone
    nothing = ModelEvaluator(model, empty, []).evaluate(server, state)
    assert set(nothing) == {"accuracy", "macro_f1", "loss"}
    assert all(math.isnan(score) for score in nothing.values())
