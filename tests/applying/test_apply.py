"""Adapters written into full models (`fedlora apply`). Kinds of evidence: oracle (peft, unmerged) and end-to-end.

peft puts the adapter beside a fresh model and answers; the written model, loaded as anybody would load it, must answer
the same, in float64. peft's own merge is no oracle here: it is wrong in places. What cannot be merged is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    BertForSequenceClassification,
    LlamaForCausalLM,
    PreTrainedModel,
)

from fedlora.data.demo import PACKAGED
from support.bases import reconfigure, refused, rewrite, said, small
from support.command_line import Said
from support.peft_cases import CASES, TIED, Case, loaded, randomise, saved
from support.tiny_models import TOKENS, bert, distilbert

pytestmark = pytest.mark.filterwarnings("ignore")


def read(model: nn.Module, folder: Path) -> nn.Module:
    """The model in a folder, in the class of `model`."""
    return type(model).from_pretrained(folder).eval()


OF_TRANSFORMERS = {build: isinstance(build(), PreTrainedModel) for build in {case.build for case in CASES.values()}}
WRITTEN = [name for name, case in CASES.items() if OF_TRANSFORMERS[case.build]]


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", WRITTEN)
def test_the_written_model_answers_as_peft_with_the_adapter_beside_it(
    name: str, tmp_path: Path, main: Callable[..., Said]
) -> None:
    """Every case of peft_cases.py on a model of transformers: equal logits in float64; `validate --base` judges the
    same."""
    case: Case = CASES[name]
    adapter, base = saved(case, 0, tmp_path / "adapter"), tmp_path / "base"
    case.build().save_pretrained(base)
    done = main("export", "--for", "merged", adapter, "--base", base, "-o", tmp_path / "full")
    assert done.code == 0 and main("validate", adapter, "--base", base).code == 0, done.err
    want = said(loaded(case, adapter), case.inputs)
    got = said(read(case.build(), tmp_path / "full"), case.inputs)
    assert float((want - said(case.build(), case.inputs)).abs().max()) > 0.05
    torch.testing.assert_close(got, want, rtol=0, atol=max(1e-11, case.tolerance))


# ---- single decisions ------------------------------------------------------------------------------------------------


def test_a_number_beyond_float16_is_refused_by_name(tmp_path: Path, main: Callable[..., Said]) -> None:
    """65504 is float16's largest; float32 holds what comes out."""
    adapter, base = small(tmp_path, torch.float16)
    key = "base_model.model.model.layers.1.self_attn.q_proj.lora_{}.weight"

    def grow(tensors: dict[str, Tensor]) -> None:
        tensors[key.format("A")], tensors[key.format("B")] = torch.ones(2, 32), torch.full((32, 2), 25000.0)

    rewrite(adapter, grow)
    done = main("export", "--for", "merged", adapter, "--base", base, "-o", tmp_path / "full")
    assert done.code == 2 and not (tmp_path / "full").exists()
    assert re.search(r"layers.1.self_attn.q_proj.weight' would hold 10\d{4} .*float16.*65504.*--dtype", done.err)
    done = main("export", "--for", "merged", adapter, "--base", base, "-o", tmp_path / "full", "--dtype", "float32")
    assert done.code == 0, done.err
    written = safetensors.torch.load_file(tmp_path / "full" / "model.safetensors")
    assert {t.dtype for t in written.values()} == {torch.float32}
    assert 99_000 < float(written["model.layers.1.self_attn.q_proj.weight"].max()) < 101_000
    config = json.loads((tmp_path / "full" / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == "float32"
    loaded_again = LlamaForCausalLM.from_pretrained(tmp_path / "full")
    assert loaded_again.dtype == torch.float32


def test_an_update_that_rounding_swallows_is_told(tmp_path: Path, main: Callable[..., Said]) -> None:
    """bfloat16 has 8 bits: an update of 1e-5 of a weight is lost in it, and none of it in float32."""
    adapter, base = small(tmp_path, torch.bfloat16)

    def shrink(tensors: dict[str, Tensor]) -> None:
        for key in tensors:
            tensors[key] = tensors[key] * 1e-2

    rewrite(adapter, shrink)
    done = main("export", "--for", "merged", adapter, "--base", base, "-o", tmp_path / "narrow", "--json")
    told = json.loads(done.out)["rounding"]
    plain, written = (safetensors.torch.load_file(f / "model.safetensors") for f in (base, tmp_path / "narrow"))
    lora = safetensors.torch.load_file(adapter / "adapter_model.safetensors")
    update = lost = 0.0
    for name in json.loads(done.out)["changed"]:
        path = f"base_model.model.{name.removesuffix('.weight')}"
        delta = 2 * (lora[f"{path}.lora_B.weight"].double() @ lora[f"{path}.lora_A.weight"].double())
        update += float(delta.square().sum())
        lost += float((written[name].double() - plain[name].double() - delta).square().sum())
    assert told["lost"] == pytest.approx((lost / update) ** 0.5, rel=1e-9) and told["lost"] > 0.5
    done = main("export", "--for", "merged", adapter, "--base", base, "-o", tmp_path / "wide", "--dtype", "float32")
    assert "loses" in done.out and float(re.search(r"loses (\S+) of", done.out)[1]) < 1e-2  # type: ignore[index]


def test_a_vanished_update_is_told(tmp_path: Path, main: Callable[..., Said]) -> None:
    """Nothing of it is left in bfloat16."""
    adapter, base = small(tmp_path, torch.bfloat16)

    def shrink(tensors: dict[str, Tensor]) -> None:
        for key in tensors:
            tensors[key] = tensors[key] * 1e-9

    rewrite(adapter, shrink)
    done = main("export", "--for", "merged", adapter, "--base", base, "-o", tmp_path / "full")
    assert done.code == 0 and re.search("loses .*update in 2 tensors", done.err)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float32, 1e-20), (torch.bfloat16, 1e-40), (torch.float64, 1e-40), (torch.float64, 1e-190)],
)
def test_an_update_far_below_the_weights_is_not_called_lossless(
    dtype: torch.dtype, size: float, tmp_path: Path, main: Callable[..., Said]
) -> None:
    """All of it is lost, though W + B A is W in float64 too: the update itself is what the loss is measured by."""
    adapter, base = small(tmp_path, dtype)

    def shrink(tensors: dict[str, Tensor]) -> None:
        for key in tensors:
            tensors[key] = tensors[key].double() * (size if "lora_B" in key else 1)

    rewrite(adapter, shrink)
    done = main("export", "--for", "merged", adapter, "--base", base, "-o", tmp_path / "full", "--json")
    told = json.loads(done.out)["rounding"]
    assert told["lost"] == pytest.approx(1.0, rel=1e-12) and len(told["vanished"]) == 2, told
    plain, written = (safetensors.torch.load_file(f / "model.safetensors") for f in (base, tmp_path / "full"))
    assert all(torch.equal(t, written[name]) for name, t in plain.items())


def test_a_double_base_loses_digits_too(tmp_path: Path, main: Callable[..., Said]) -> None:
    """The rounding of float64 counts: measured against the update in 40 digits (Python's fractions)."""
    adapter, base = small(tmp_path, torch.float64)
    rewrite(adapter, lambda tensors: tensors.update({k: t.double() * 1e-8 for k, t in tensors.items()}))
    done = main("export", "--for", "merged", adapter, "--base", base, "-o", tmp_path / "full", "--json")
    plain, written = (safetensors.torch.load_file(f / "model.safetensors") for f in (base, tmp_path / "full"))
    lora = safetensors.torch.load_file(adapter / "adapter_model.safetensors")
    update = lost = Fraction()
    for name in json.loads(done.out)["changed"]:
        path = f"base_model.model.{name.removesuffix('.weight')}"
        delta = 2 * (lora[f"{path}.lora_B.weight"] @ lora[f"{path}.lora_A.weight"])
        for d, old, new in zip(delta.flatten().tolist(), plain[name].flatten().tolist(),
                               written[name].flatten().tolist(), strict=True):  # fmt: skip
            update += Fraction(d) ** 2
            lost += (Fraction(new) - Fraction(old) - Fraction(d)) ** 2
    want = float(lost / update) ** 0.5
    assert 0.01 < want < 1 and json.loads(done.out)["rounding"]["lost"] == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_base_is_rounded_once(dtype: torch.dtype, tmp_path: Path, main: Callable[..., Said]) -> None:
    """Each number is the one of the type that is nearest to W + B A in float64; what is not adapted stays as it was."""
    adapter, base = small(tmp_path, dtype, target_modules=["q_proj", "down_proj"])
    assert main("export", "--for", "merged", adapter, "--base", base, "-o", tmp_path / "full").code == 0
    plain, written = (safetensors.torch.load_file(f / "model.safetensors") for f in (base, tmp_path / "full"))
    lora = safetensors.torch.load_file(adapter / "adapter_model.safetensors")
    assert plain.keys() == written.keys()
    for name, weight in plain.items():
        path, want = f"base_model.model.{name.removesuffix('.weight')}", weight
        if f"{path}.lora_A.weight" in lora:
            delta = 2 * (lora[f"{path}.lora_B.weight"].double() @ lora[f"{path}.lora_A.weight"].double())
            want = (weight.double() + delta).to(dtype)
        assert torch.equal(written[name], want), name


TOKENS_WRONG: Mapping[str, tuple[Any, str]] = {
    "out of range": ([1, 40], r"names token 40, but 'model.embed_tokens.weight' has 0 to 39"),
    "negative": ([1, -1], "names token -1|whole numbers from 0"),
    "twice": ([3, 3], "names token 3 .* twice"),
    "too few": ([1], "trainable_token_indices names 1"),
    "of another table": ({"words": [1, 2]}, "names 'words', but the file has no rows of it"),
    "no numbers": ([1, True], "whole numbers|does not say which rows"),
}


@pytest.mark.parametrize("missing", ["classifier.weight", "classifier.bias"])
def test_a_saved_module_is_saved_whole(missing: str, tmp_path: Path, main: Callable[..., Said]) -> None:
    """peft asks for each tensor of the base model's module, and fails on a file that lacks one."""
    adapter, base = small(tmp_path, build=bert, target_modules=["query"], task_type="SEQ_CLS")
    rewrite(adapter, lambda tensors: tensors.pop(f"base_model.model.{missing}"))
    with pytest.raises(KeyError, match=missing):
        PeftModel.from_pretrained(bert(), adapter)
    refused(main, adapter, base, f"the file lacks '{missing}'")


def test_a_head_on_an_encoder_stored_alone(tmp_path: Path, main: Callable[..., Said]) -> None:
    """BertModel's file lacks the prefix and the classifier: both are found, the head is named as added, and the written
    model answers as peft's."""
    model: Any = bert().double()
    model.bert.save_pretrained(tmp_path / "base")
    torch.manual_seed(0)
    fresh = lambda: BertForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=3).eval()  # noqa: E731
    fields = {"r": 2, "target_modules": ["query"], "task_type": "SEQ_CLS", "modules_to_save": ["pooler"]}
    peft_model = get_peft_model(fresh(), LoraConfig(**fields))
    randomise(peft_model, 1)
    peft_model.save_pretrained(tmp_path / "adapter")
    want = said(PeftModel.from_pretrained(fresh(), tmp_path / "adapter").eval(), {"input_ids": TOKENS})
    done = main("export", "--for", "merged", tmp_path / "adapter", "--base", tmp_path / "base", "-o", tmp_path / "full")
    assert done.code == 0 and "classifier.weight (3, 32) is added" in done.err
    full = BertForSequenceClassification.from_pretrained(tmp_path / "full", num_labels=3).eval()
    torch.testing.assert_close(said(full, {"input_ids": TOKENS}), want, rtol=0, atol=1e-10)


CLASSES = ("no", "yes", "may be")
FACTS = {"client": "a", "num_examples": 1}
SAYS_CLASSES = {
    "labels.json": {"num_labels": 3, "id2label": dict(enumerate(CLASSES))},
    "upload.json": FACTS | {"label_names": list(CLASSES)},
    "nothing": {},
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("says", SAYS_CLASSES)
@pytest.mark.parametrize("build", [bert, distilbert], ids=lambda build: build.__name__)
def test_a_classifier_is_loaded_by_its_own_config(
    build: Callable[[], Any], says: str, tmp_path: Path, main: Callable[..., Said]
) -> None:
    """An encoder's config.json knows no classes. The written model is loaded by AutoModelForSequenceClassification with
    no word on them, answers as peft's, and is not passed off as the base model by its card."""
    model = build().double()
    model.base_model.save_pretrained(tmp_path / "base")
    card = "---\nlicense: apache-2.0\nlibrary_name: sentence-transformers\n---\n# Of the base\n"
    (tmp_path / "base" / "README.md").write_text(card)
    torch.manual_seed(0)
    fresh = lambda: type(model).from_pretrained(tmp_path / "base", num_labels=3).eval()  # noqa: E731
    target = "query" if build is bert else "q_lin"
    peft_model = get_peft_model(fresh(), LoraConfig(r=2, target_modules=[target], task_type="SEQ_CLS"))
    randomise(peft_model, 1)
    peft_model.save_pretrained(tmp_path / "adapter")
    reconfigure(tmp_path / "adapter", base_model_name_or_path="org/tiny")
    (tmp_path / "adapter" / says).write_text(json.dumps(SAYS_CLASSES[says]))
    want = said(PeftModel.from_pretrained(fresh(), tmp_path / "adapter").eval(), {"input_ids": TOKENS})

    to = ["--base", tmp_path / "base", "-o", tmp_path / "full"]
    done = main("export", tmp_path / "adapter", "--for", "merged", *to)
    first = CLASSES[0] if says != "nothing" else "LABEL_0"
    assert done.code == 0 and f"config.json has its classes: '{first}'" in done.err, done.err
    full = AutoModelForSequenceClassification.from_pretrained(tmp_path / "full").eval()
    torch.testing.assert_close(said(full, {"input_ids": TOKENS}), want, rtol=0, atol=1e-10)
    names = CLASSES if says != "nothing" else ("LABEL_0", "LABEL_1", "LABEL_2")
    assert full.config.id2label == dict(enumerate(names)) and full.config.label2id == {
        n: k for k, n in enumerate(names)
    }
    config = json.loads((tmp_path / "full" / "config.json").read_text())
    assert config["architectures"] == [type(model).__name__] and len(config["id2label"]) == 3
    written = (tmp_path / "full" / "README.md").read_text()
    front = "---\nlibrary_name: transformers\nlicense: apache-2.0\nbase_model: org/tiny\n"
    assert written.startswith(front) and "AutoModelForSequenceClassification" in written
    assert (
        written.index("A full model with a LoRA adapter")
        < written.index("another model")
        < written.index("# Of the base")
    )
    assert main("export", tmp_path / "adapter", "--for", "merged", *to, "--force").code == 0


def test_a_head_of_no_known_class_is_refused(tmp_path: Path, main: Callable[..., Said]) -> None:
    """No class of transformers has a head of that name: which model it makes is known to its own program."""
    NoBodysHead().bert.save_pretrained(tmp_path / "base")
    options = LoraConfig(r=2, target_modules=["query"], modules_to_save=["judge"], task_type="SEQ_CLS")
    get_peft_model(NoBodysHead(), options).save_pretrained(tmp_path / "adapter")
    reconfigure(tmp_path / "adapter", modules_to_save=["judge"])
    refused(main, tmp_path / "adapter", tmp_path / "base", r"has no 'judge\.\w+'.*merge_and_unload")


class NoBodysHead(BertForSequenceClassification):
    def __init__(self) -> None:
        super().__init__(bert().config)
        del self.classifier
        self.judge = nn.Linear(32, 4)


@pytest.mark.parametrize("shards", ["20KB", "1GB"])
def test_sharded_and_tied(shards: str, tmp_path: Path, main: Callable[..., Said]) -> None:
    """A head that becomes a tensor of its own goes into a file of its own; the model loads and answers as peft's."""
    model: Any = TIED()
    model.save_pretrained(tmp_path / "base", max_shard_size=shards)
    peft_model = get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head", "q_proj"]))
    randomise(peft_model, 1)
    peft_model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    again = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    want = said(PeftModel.from_pretrained(again, tmp_path / "adapter").eval(), {"input_ids": TOKENS})
    merged = ["export", tmp_path / "adapter", "--for", "merged"]
    done = main(*merged, "--base", tmp_path / "base", "-o", tmp_path / "full", "--json")
    assert json.loads(done.out)["added"] == ["lm_head.weight"]
    got = said(LlamaForCausalLM.from_pretrained(tmp_path / "full").eval(), {"input_ids": TOKENS})
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
    assert json.loads((tmp_path / "full" / "config.json").read_text())["tie_word_embeddings"] is False


def test_two_different_weights_under_a_tie_are_refused(tmp_path: Path, main: Callable[..., Said]) -> None:
    """config.json says that they are one, the file has two: which is meant is not known."""
    adapter, base = small(tmp_path, target_modules=["lm_head"])
    reconfigure(base, tie_word_embeddings=True)
    done = main("export", "--for", "merged", adapter, "--base", base, "-o", tmp_path / "full")
    assert done.code == 2 and re.search(r"lm_head.weight.* different numbers", done.err), done.err
    assert not (tmp_path / "full").exists()


# ---- the base model's name -------------------------------------------------------------------------------------------


def test_a_packaged_model_is_named_as_train_names_it(
    tmp_path: Path, main: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, base = small(tmp_path)
    monkeypatch.setitem(PACKAGED, "demo", lambda: base)
    assert main("validate", adapter, "--base", "demo").code == 0
    done = main("export", "--for", "merged", adapter, "--base", "demo", "-o", tmp_path / "full")
    assert done.code == 0 and (tmp_path / "full" / "model.safetensors").is_file(), done.err
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(PACKAGED, "smollm2", lambda: tmp_path / "model.gguf")
    for name, why in (("smollm2", r"one file, model\.gguf.*SmolLM2-135M-Instruct, from the hub"), ("nowhere", "demo")):
        for command in (["export", "--for", "merged", adapter, "-o", tmp_path / "more"], ["validate", adapter]):
            assert re.search(why, main(*command, "--base", name).complaint())
