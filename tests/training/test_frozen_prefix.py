"""Remembered layers: the same training and scores as without, and refusals where they would not be. Kind: oracle (the
model without the table)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from fedlora import Client, Server, build
from fedlora.client import begin_round
from fedlora.core.lora import Adapter
from fedlora.core.messages import ClientMemory
from fedlora.errors import ConfigError
from fedlora.training import frozen_prefix
from fedlora.training.evaluation import ModelEvaluator
from fedlora.training.local import LocalTrainer
from fedlora.training.models import AdaptedModel
from fedlora.training.settings import LoRASettings, TrainSettings
from support.known_warnings import FUTURE_NAMES, NOT_ON_THE_HUB
from support.training_data import LABELS, classification, save_encoder

pytestmark = [FUTURE_NAMES, NOT_ON_THE_HUB]
LAST = ["layer.1.attention.self.query", "layer.1.attention.self.value"]  # of two layers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("encoder") / "model", layers=2)


def load(folder: Path, *, remember: bool, targets: list[str] | str = LAST, dropout: float | None = 0.0) -> AdaptedModel:
    return AdaptedModel.load(
        folder,
        "classification",
        LoRASettings(targets=targets),
        labels=LABELS,
        dropout=dropout,
        remember_prefix=remember,
    )


def trained(model: AdaptedModel) -> tuple[Adapter, float, dict[str, float]]:
    data = classification(40, 0)
    seed, _ = model.seed_adapter(4, seed=0)
    server = Server(build("glora"))
    state = server.init(seed)
    job = begin_round(server.download(state, Client("a", 4)), ClientMemory())
    settings = TrainSettings(steps=6, batch_size=8, lr=1e-2, max_length=12)
    made = LocalTrainer(model, {"a": data}, settings, seed=0).train(job.download, job.adapter, 0)
    scores = ModelEvaluator(model, classification(30, 1), [], batch_size=7).measure_adapter(made.adapter)
    return made.adapter, made.loss, scores


def test_training_and_scores_are_those_of_the_whole_model(folder: Path) -> None:
    """Up to the rounding of padded batches: losses to 1e-5, weights as far as six steps of Adam carry that."""
    frozen_prefix.tables.clear()
    (a, loss, scores), (b, other, theirs) = (trained(load(folder, remember=r)) for r in (False, True))
    assert loss == pytest.approx(other, rel=1e-5) and scores["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    for name, lora in a.modules.items():
        for ours, same in zip(lora.factors, b.modules[name].factors, strict=True):
            torch.testing.assert_close(ours, same, rtol=1e-2, atol=1e-3)


def test_a_second_model_of_the_same_weights_reads_the_same_table(folder: Path) -> None:
    """And has the same bits, whoever filled it: in a run that is resumed the table is empty again."""
    frozen_prefix.tables.clear()
    first, *_ = trained(load(folder, remember=True))
    (table,) = frozen_prefix.tables.values()
    count = len(table.known)
    again, *_ = trained(load(folder, remember=True))
    assert len(frozen_prefix.tables) == 1 and len(table.known) == count <= 70, "one entry for each distinct text"
    for name, lora in first.modules.items():
        assert all(torch.equal(x, y) for x, y in zip(lora.factors, again.modules[name].factors, strict=True))


def test_what_is_remembered_is_no_part_of_the_model(folder: Path) -> None:
    """Neither its parameters nor its adapters: only the layers from the first adapted one on."""
    model = load(folder, remember=True)
    model.seed_adapter(2, seed=0)
    names = [name for name, _ in model.network.named_parameters()]
    assert not any("embeddings" in name or "layer.0." in name for name in names)
    assert any("layer.1." in name for name in names)


@pytest.mark.parametrize(
    ("targets", "dropout", "says"),
    [
        (["query"], 0.0, "nothing to remember"),
        ("all-linear", 0.0, "nothing to remember"),
        ([*LAST, "pooler.dense"], 0.0, "nothing to remember"),
        (LAST, 0.1, "dropout 0.1"),
    ],
)
def test_what_cannot_be_remembered_is_refused(folder: Path, targets: list[str], dropout: float, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(folder, remember=True, targets=targets, dropout=dropout)


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="Linear is not"):
        frozen_prefix.remember(torch.nn.Linear(2, 2), LAST, 0)


@pytest.mark.parametrize("kind", ["MPNet", "DebertaV2"])
def test_layers_that_need_more_than_the_layer_before_are_refused(kind: str) -> None:
    """Position biases, masks of their own, results in tuples: each loud when it is set, and no run begins."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = getattr(transformers, f"{kind}Config")(vocab_size=40, max_position_embeddings=40, **sizes)
    network = getattr(transformers, f"{kind}ForSequenceClassification")(config)
    for module in network.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    names = [name for name, m in network.named_modules() if ".layer.1." in name and isinstance(m, torch.nn.Linear)]
    with pytest.raises(ConfigError, match=f"{kind}ForSequenceClassification"):
        frozen_prefix.remember(network, names, 0)


def test_each_precision_has_entries_of_its_own(folder: Path) -> None:
    """bfloat16 and float32 runs of one process: neither reads what the other computed."""
    frozen_prefix.tables.clear()
    model = load(folder, remember=True)
    model.seed_adapter(2, seed=0)
    ids = torch.tensor([[1, 5, 6, 2]])
    with torch.no_grad():
        wide = model.network(input_ids=ids).logits
        with torch.autocast("cpu", dtype=torch.bfloat16):
            narrow = model.network(input_ids=ids).logits
        again = model.network(input_ids=ids).logits
    (table,) = frozen_prefix.tables.values()
    (a, b) = table.known.values()
    assert torch.equal(wide, again) and not torch.equal(wide, narrow.float()) and not torch.equal(a, b)


def test_what_is_remembered_has_a_bound(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slab holds three texts of 4 tokens and width 32, and there is room for two: what does not fit is computed each
    time, and the texts of another model push these out. Whoever computes, the bits are the same."""
    frozen_prefix.tables.clear()
    monkeypatch.setattr(frozen_prefix, "_SLAB", 3 * 4 * 32 * 4)
    monkeypatch.setattr(frozen_prefix, "MOST", 2 * frozen_prefix._SLAB)
    texts = [torch.tensor([[1, word, word + 1, 2]]) for word in range(5, 15)]

    def says(model: AdaptedModel) -> list[torch.Tensor]:
        with torch.no_grad():
            return [model.network(input_ids=ids).logits for ids in texts]

    model = load(folder, remember=True)
    first = says(model)
    (table,) = frozen_prefix.tables.values()
    assert len(table.known) == 6 and len(table.slabs) == 2
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    weights = load_file(other / "model.safetensors")
    weights["embeddings.word_embeddings.weight"] += 1.0
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    says(load(other, remember=True))
    assert table not in frozen_prefix.tables.values() and len(frozen_prefix.tables) == 1
    for again in (model, load(folder, remember=True)):
        assert all(torch.equal(a, b) for a, b in zip(first, says(again), strict=True))
