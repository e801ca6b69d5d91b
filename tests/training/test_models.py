"""The shared model as it is loaded: heads, seeds, dropout, and what is refused. Tiny transformers, no network.

Kinds of evidence: *end-to-end* (real transformers and peft on models saved to disk and loaded again), *oracle* (logits
of a dense copy), *contract* (what cannot be loaded is one line).
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from fedlora.core.lora import LoRA, named_tensors
from fedlora.errors import ConfigError
from fedlora.training.digests import base_digest, model_content
from fedlora.training.load import check_device
from fedlora.training.loop import LocalTrainer
from fedlora.training.measure import ModelEvaluator
from fedlora.training.models import AdaptedModel
from fedlora.training.settings import LoRASettings, TrainSettings
from support.local_training import Loader, bits, dense, logits
from support.tiny_models import bert, llama
from support.training_data import CLS, SEP, classification, save_model, word


def test_a_new_head_is_drawn_from_the_seed(load: Loader, encoder: Path) -> None:
    heads = [load(encoder, seed=s).seed_adapter(4, seed=0)[0].heads["classifier.weight"] for s in (0, 0, 1)]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert heads[0].shape == (3, 32)


def test_a_seed_adapter_is_a_fresh_lora_of_its_seed(load: Loader, classifier: Path) -> None:
    """B = 0, so the model says what the plain one does; A from the seed; the heads are the model's own."""
    adapters = []
    for seed in (0, 0, 1):
        model = load()
        adapter, spec = model.seed_adapter(4, seed=seed)
        adapters.append(adapter)
    assert bits(adapters[0]) == bits(adapters[1]) != bits(adapters[2])
    assert all(bool((x.factors[0] == 0).all()) and bool((x.factors[1] != 0).any()) for x in adapter.modules.values())
    plain = dense(classifier, bert, {}, {})
    for name, head in adapter.heads.items():
        assert torch.equal(head, dict(plain.named_parameters())[name])
    ids = [CLS, word(1), word(2), SEP]
    torch.testing.assert_close(logits(model.network, ids), logits(plain, ids), rtol=1e-5, atol=1e-6)
    assert spec.scaling == 2.0 and spec.base_model == str(classifier)


def test_dropout_replaces_every_rate_of_the_model(load: Loader) -> None:
    rates = {m.p for m in load(dropout=0.25).network.modules() if isinstance(m, nn.Dropout)}
    assert rates == {0.25}
    own = {m.p for m in load(dropout=None).network.modules() if isinstance(m, nn.Dropout)}
    assert own == {0.1}, "BERT's own default"


def test_a_model_without_its_tokenizer_is_refused(load: Loader, classifier: Path, tmp_path: Path) -> None:
    """transformers 5 makes up an empty BERT vocabulary instead, and every word would be [UNK]."""
    folder = tmp_path / "no-tokenizer"
    shutil.copytree(classifier, folder, ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(ConfigError, match="tokenizer"):
        load(folder)


def pickled(folder: Path, *more: tuple[str, object]) -> Path:
    """The folder's weights as PyTorch's own file, and beside them what is given."""
    weights = safetensors.torch.load((folder / "model.safetensors").read_bytes())
    (folder / "model.safetensors").unlink()
    torch.save({**weights, **dict(more)}, folder / "pytorch_model.bin")
    return folder


def test_pickled_weights_are_the_same_model_of_the_same_digest(load: Loader, classifier: Path, tmp_path: Path) -> None:
    """The paper's LLaMA-1B has no other file. The digests of the weights, name by name, do not see the layout."""
    folder = shutil.copytree(classifier, tmp_path / "pickled")
    before, digest = load(folder).network.state_dict(), base_digest(folder)
    after = load(pickled(folder)).network.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert base_digest(folder) == digest
    whole = hashlib.sha256((folder / "pytorch_model.bin").read_bytes()).hexdigest()
    assert model_content(folder)["pytorch_model.bin"] == whole


class Touches:
    """What a pickle may do: call anything."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.file,)


def test_a_pickle_that_calls_is_not_opened(load: Loader, classifier: Path, tmp_path: Path) -> None:
    folder = pickled(shutil.copytree(classifier, tmp_path / "m"), ("x", Touches(tmp_path / "called")))
    for opened in (load, base_digest):
        with pytest.raises(ConfigError, match=r"tensors alone"):
            opened(folder)
    assert not (tmp_path / "called").exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert (tmp_path / "called").exists(), "the file is as dangerous as it says"


def test_a_base_in_bfloat16_multiplies_as_a_float32_one_under_autocast(load: Loader) -> None:
    """Autocast rounds float32 weights to bfloat16 before each product, so those products have the same bits; embeddings
    and norms may differ by one rounding, 2^-8. What is trained and travels stays float32."""
    said = []
    for dtype in ("float32", "bfloat16"):
        model = load(dtype=dtype)
        model.activate(model.seed_adapter(2, seed=0)[0])
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            said.append(model.network.eval()(input_ids=torch.arange(4, 12).reshape(2, 4)).logits.float())
        assert {p.dtype for p in model.trainable()} == {torch.float32}
        assert {tensor.dtype for _, tensor in named_tensors(model.read())} == {torch.float32}
        assert model.network.get_input_embeddings().weight.dtype == getattr(torch, dtype)
    assert torch.allclose(*said, atol=0.05 * float(said[0].abs().max()))


def test_weights_of_other_shapes_than_wanted_are_our_error(load: Loader, classifier: Path, tmp_path: Path) -> None:
    """The directory's own head has 3 labels, the data 2: the likeliest mistake with a model fine-tuned before. Or the
    config has other sizes than the weights."""
    folder = shutil.copytree(classifier, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 7}))
    for door, said in (
        (lambda: load(labels=("no", "yes")), r"cannot be loaded: .*\(3,\) .*2 classes.*data\.label_names"),
        (lambda: load(folder), r"position_embeddings.weight' has the shape .* but \(7, 32\) by its config"),
    ):
        with pytest.raises(ConfigError, match=said):
            door()


def test_data_of_other_classes_than_the_models_are_refused(load: Loader) -> None:
    """Files that were read without label_names number the classes that they happen to hold."""
    model, right = load(), classification(8, 0)
    wrong = replace(right, labels=(0, 1) * 4, label_names=("blue", "red"))
    with pytest.raises(ConfigError, match=r"classes \['blue', 'green', 'red'\], .*\['blue', 'red'\]"):
        LocalTrainer(model, {"a": right, "b": wrong}, TrainSettings(max_steps=1), seed=0)
    with pytest.raises(ConfigError, match="class k is the k-th name"):
        ModelEvaluator(model, {"": wrong}, (), target="server")


@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True:UserWarning")
def test_a_changed_base_weight_is_not_its_tied_twins(tmp_path: Path) -> None:
    """lm_head and the embedding are one parameter in pre-training. By hand: W0 + 2 B A for the head, W0 for the other;
    and one again when nothing is added."""
    tied = llama()
    tied.config.tie_word_embeddings = True
    tied.tie_weights()  # type: ignore[operator]
    save_model(tmp_path / "tied", tied, classifies=False)
    model = AdaptedModel.load(tmp_path / "tied", "causal-lm", LoRASettings(target_modules=["lm_head"], scaling=2.0))
    seed, _ = model.seed_adapter(2, seed=0)
    (name,) = seed.modules
    base = model.network.get_submodule("base_model.model.model.embed_tokens").weight.detach().clone()
    B, A = torch.randn(base.shape[0], 2), torch.randn(2, base.shape[1])
    model.activate(replace(seed, base={name: LoRA(B, A)}))
    embedding = model.network.get_submodule("base_model.model.model.embed_tokens")
    head = model.network.get_submodule(f"base_model.model.{name}").base_layer
    assert torch.equal(embedding.weight, base)
    torch.testing.assert_close(head.weight, base + 2 * B @ A)
    model.activate(seed)
    assert head.weight is embedding.weight and torch.equal(head.weight, base)


def test_a_device_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device in ("cpu", "cuda", "cuda:1"):
        check_device(device, load_in_4bit=False)
    for device, load_in_4bit, said in (
        ("cuda:2", False, "torch sees 2 GPUs"), ("meta", False, "on device 'meta'"), ("gpu", False, "device 'gpu'"),
        ("cpu", True, "load_in_4bit needs a GPU"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            check_device(device, load_in_4bit)
