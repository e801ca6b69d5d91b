"""Class weights in training. Kind of evidence: *oracle* - weights by hand and by scikit-learn, losses and gradients by
torch's CrossEntropyLoss(weight=...) on a dense copy of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch import nn

from fedlora.data import TextData
from fedlora.errors import ConfigError
from fedlora.training.encode import encode
from fedlora.training.loop import LocalTrainer, weigh_classes
from fedlora.training.settings import TrainSettings
from support.known_warnings import FUTURE_NAMES
from support.local_training import Loader, dense, distance, download, drawn
from support.tiny_models import bert
from support.training_data import LABELS, classification, instructions, tokenizer

pytestmark = FUTURE_NAMES

SETTINGS = TrainSettings(learning_rate=0.1, optimizer="sgd", max_steps=2, batch_size=8, max_grad_norm=0.0)


def of(labels: list[int]) -> TextData:
    return TextData("classification", tuple(f"w{k}" for k in range(len(labels))), labels=labels, label_names=LABELS)


def test_balanced_is_by_the_clients_own_counts() -> None:
    """Three of class 0 and one of class 1: 4 / (2 * 3) and 4 / (2 * 1); class 2 is not there. As scikit-learn says."""
    labels = [0, 1, 0, 0]
    weights = weigh_classes(of(labels), "balanced")
    assert weights == pytest.approx((2 / 3, 2.0, 0.0))
    theirs = compute_class_weight("balanced", classes=np.array([0, 1]), y=np.array(labels))
    assert weights[:2] == pytest.approx(theirs.tolist())  # type: ignore[index]
    assert weigh_classes(of([2, 2]), "balanced") == (0.0, 0.0, 1.0), "one class alone is as if there were no weights"
    assert weigh_classes(of([0, 1]), None) is None


def test_a_language_model_has_no_classes_to_weigh(load_language_model: Loader) -> None:
    with pytest.raises(ConfigError, match="instructions have none"):
        LocalTrainer(
            load_language_model(),
            {"a": instructions(4, 0)},
            SETTINGS.model_copy(update={"class_weights": "balanced", "chat_template": "{prompt}"}),
            seed=0,
        )


def test_one_step_is_torchs_weighted_cross_entropy(load: Loader, classifier: Path) -> None:
    """B = 0, so the model is the plain one: the loss that is reported, and the head's step by plain SGD."""
    data = classification(8, 0, skew=1)
    counts = np.bincount(data.labels or (), minlength=3)
    assert sorted(counts)[0] != sorted(counts)[2], "weights matter"
    model = load()
    adapter, _ = model.seed_adapter(4, seed=0)
    settings = SETTINGS.model_copy(update={"max_steps": 1, "class_weights": "balanced"})
    trained = LocalTrainer(model, {"a": data}, settings, seed=0).train(download(adapter), adapter, 0)

    plain = dense(classifier, bert, {}, {})
    weight = [8 / (np.count_nonzero(counts) * c) if c else 0.0 for c in counts]
    criterion = nn.CrossEntropyLoss(weight=torch.tensor(weight, dtype=torch.float32))
    rows = [plain(input_ids=torch.tensor([e["input_ids"]])).logits[0] for e in _encoded(data)]
    loss = criterion(torch.stack(rows), torch.tensor(data.labels))
    loss.backward()
    assert trained.loss == pytest.approx(loss.item(), rel=1e-5)
    step = trained.adapter.heads["classifier.weight"] - adapter.heads["classifier.weight"]
    torch.testing.assert_close(step, -0.1 * plain.classifier.weight.grad, rtol=1e-4, atol=1e-6)
    unweighted = LocalTrainer(model, {"a": data}, settings.model_copy(update={"class_weights": None}), seed=0)
    assert distance(unweighted.train(download(adapter), adapter, 0).adapter, trained.adapter) > 1e-3


def _encoded(data: TextData) -> Any:
    return encode(data, tokenizer(classifies=True), max_length=128)


@pytest.mark.parametrize("accumulation", [2, 3])
def test_accumulation_is_the_weighted_mean_over_the_whole_batch(load: Loader, accumulation: int) -> None:
    """Not the mean of micro-batch means, whose weights differ."""
    model = load()
    adapter = drawn(model.seed_adapter(4, seed=0)[0], 4, 1)
    data = {"a": classification(8, 0, skew=1)}
    whole, parts = (
        LocalTrainer(
            model, data, SETTINGS.model_copy(update={"accumulation": k, "class_weights": "balanced"}), seed=0
        ).train(download(adapter), adapter, 0)
        for k in (1, accumulation)
    )
    assert distance(parts.adapter, whole.adapter) < 1e-5
    assert parts.loss == pytest.approx(whole.loss, rel=1e-5)
    assert distance(whole.adapter, adapter) > 1e-2
