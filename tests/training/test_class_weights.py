"""Class weights in training. Kind of evidence: *oracle* - weights by hand, losses and gradients by
torch's CrossEntropyLoss(weight=...) on a dense copy of the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedlora.data import TextData
from fedlora.errors import ConfigError
from fedlora.training.encode import encode
from fedlora.training.loop import LocalTrainer, weigh_classes
from fedlora.training.settings import TrainSettings
from support.known_warnings import FUTURE_NAMES
from support.local_training import Loader, dense, download
from support.tiny_models import bert
from support.training_data import LABELS, classification, instructions, tokenizer

pytestmark = FUTURE_NAMES


def test_balanced_is_by_the_clients_own_counts() -> None:
    """Three of class 0 and one of class 1: 4 / (2 * 3) and 4 / (2 * 1); class 2 is not there."""
    data = TextData("classification", ("w0", "w1", "w2", "w3"), labels=(0, 1, 0, 0), label_names=LABELS)
    assert weigh_classes(data, "balanced") == pytest.approx((2 / 3, 2.0, 0.0))
    assert weigh_classes(data, None) is None
    with pytest.raises(ConfigError, match="instructions have none"):
        weigh_classes(instructions(4, 0), "balanced")


def test_one_step_is_torchs_weighted_cross_entropy(load: Loader, classifier: Path) -> None:
    """B = 0, so the model is the plain one: the loss that is reported, and the head's step by plain SGD."""
    data = classification(8, 0, skew=1)
    counts = np.bincount(data.labels or (), minlength=3)
    assert sorted(counts)[0] != sorted(counts)[2], "weights matter"
    model = load()
    adapter, _ = model.seed_adapter(4, seed=0)
    settings = TrainSettings(
        learning_rate=0.1, optimizer="sgd", max_steps=1, batch_size=8, max_grad_norm=0.0, class_weights="balanced"
    )
    trained = LocalTrainer(model, {"a": data}, settings, seed=0).train(download(adapter), adapter, 0)

    plain = dense(classifier, bert, {}, {})
    weight = [8 / (np.count_nonzero(counts) * c) if c else 0.0 for c in counts]
    criterion = nn.CrossEntropyLoss(weight=torch.tensor(weight, dtype=torch.float32))
    examples = encode(data, tokenizer(classifies=True), max_length=128)
    rows = [plain(input_ids=torch.tensor([e["input_ids"]])).logits[0] for e in examples]
    loss = criterion(torch.stack(rows), torch.tensor(data.labels))
    loss.backward()
    assert trained.loss == pytest.approx(loss.item(), rel=1e-5)
    step = trained.adapter.heads["classifier.weight"] - adapter.heads["classifier.weight"]
    torch.testing.assert_close(step, -0.1 * plain.classifier.weight.grad, rtol=1e-4, atol=1e-6)
