"""`fedlora.hf`: a script's own trainer in a federation. Kinds of evidence: oracle (our own loop on equal settings gives
the same losses; peft beside the base gives the same logits), end to end (scripts as programs).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding, Trainer, TrainingArguments

from fedlora import Client, Server, build
from fedlora.data import TextData
from fedlora.hf import HFTrainer
from fedlora.server.server import start
from fedlora.simulation import simulate
from fedlora.training.encoding import encode
from fedlora.training.local import LocalTrainer
from fedlora.training.models import AdaptedModel
from fedlora.training.settings import LoRASettings, TrainSettings
from support.known_warnings import FUTURE_NAMES, LORA_BIAS
from support.tiny_models import bert
from support.training_data import LABELS, classification, save_model, tokenizer

pytestmark = [FUTURE_NAMES, LORA_BIAS]
LR, STEPS, SIZE, ROUNDS = 5e-3, 4, 12, 3


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("bert"), bert(), classifies=True)


@pytest.fixture
def data() -> dict[str, TextData]:
    return {"a": classification(SIZE, 0), "b": classification(SIZE, 1)}


def model_of(base: Path, rank: int = 8) -> Any:
    names = dict(enumerate(LABELS))
    network = AutoModelForSequenceClassification.from_pretrained(
        base, id2label=names, label2id={v: k for k, v in names.items()}, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, classifier_dropout=0.0,
    )  # fmt: skip
    return get_peft_model(
        network, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["query", "value"], task_type="SEQ_CLS")
    )


def trainer_of(model: Any, examples: TextData, out: Path, **more: Any) -> Trainer:
    rows = [dict(row) for row in encode(examples, tokenizer(classifies=True), max_length=16)]
    settings = {
        "per_device_train_batch_size": SIZE, "max_steps": STEPS, "learning_rate": LR, "lr_scheduler_type": "constant",
        "weight_decay": 0.0, "max_grad_norm": 1.0, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
        "use_cpu": True,
    }  # fmt: skip
    args = TrainingArguments(str(out), **{**settings, **more})
    return Trainer(
        model, args, train_dataset=rows, data_collator=DataCollatorWithPadding(tokenizer(classifies=True))
    )  # fmt: skip


@pytest.mark.parametrize("method", ["glora", "fedex-lora", "ffa-lora"])
def test_three_rounds_of_a_trainer_have_the_losses_of_our_own_loop(
    base: Path, data: dict[str, TextData], tmp_path: Path, method: str
) -> None:
    """Equal settings: batches of all examples, no dropout, AdamW without decay is Adam, a constant rate, clipping at 1.
    Then only the order of sums differs. The methods move ranks (2 and 4 of a model of 8), the base, and freeze A.
    """
    ranks = {"a": 2, "b": 4} if method == "glora" else {"a": 4, "b": 4}
    server, clients = Server(build(method)), [Client(name, rank) for name, rank in ranks.items()]
    ours = AdaptedModel.load(
        base, "classification", LoRASettings(targets=["query", "value"]), labels=LABELS, dropout=0.0
    )  # fmt: skip
    seed_adapter, _ = ours.seed_adapter(4, seed=0)
    settings = TrainSettings(lr=LR, steps=STEPS, batch_size=SIZE, accumulation=1, max_length=16)
    local = LocalTrainer(ours, data, settings, seed=0)
    model = model_of(base)
    theirs = HFTrainer({name: trainer_of(model, part, tmp_path) for name, part in data.items()})
    expected = [dict(r.losses) for r in simulate(server, clients, local, start(server, seed_adapter), rounds=ROUNDS)]
    found = list(simulate(server, clients, theirs, start(server, seed_adapter), rounds=ROUNDS))
    for record, losses in zip(found, expected, strict=True):
        assert record.losses == pytest.approx(losses, abs=2e-5), record.round
    assert found[-1].loss < found[0].loss - 0.05  # it learns
    assert {u.num_examples for u in found[-1].uploads} == {SIZE}
