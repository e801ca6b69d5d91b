"""Adapters merged into full models (`fedlora export --format merged`). Kinds of evidence: oracle (peft) and end to end.

peft puts the adapter beside a fresh model and answers; the written model, loaded as anybody would load it, must answer
the same. What peft would pass over in silence is refused, here and by `validate --model`, in one line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from peft.tuners.lora import Linear
from transformers import AutoModelForSequenceClassification

from fedlora.adapters import AdapterFile
from fedlora.export.attached import other_base
from support.bases import reconfigure, refused, rewrite, small
from support.command_line import Said
from support.peft_boundary import kept, loaded
from support.peft_models import saved
from support.tiny_models import bert, gpt2, llama, logits, tied_llama

pytestmark = pytest.mark.filterwarnings("ignore")
Main = Callable[..., Said]

KINDS = (
    "looking ahead, as Unsloth", "all-linear", "ranks by suffix", "rsLoRA with patterns", "Conv1D",
    "heads of several tensors", "an output saved whole",
)  # fmt: skip


def answers(main: Main, build: Callable[[], Any], adapter: Path, base: Path, out: Path) -> None:
    """The written model's are those of peft with the adapter beside the base, and not the base's own."""
    done = main("export", "--format", "merged", adapter, "--model", base, "-o", out)
    assert done.code == 0 and main("validate", adapter, "--model", base).code == 0, done.err
    want, got = logits(loaded(build, adapter)), logits(type(build()).from_pretrained(out).eval())
    assert float((want - logits(build())).abs().max()) > 0.05
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", KINDS)
def test_the_written_model_answers_as_peft_with_the_adapter_beside_it(name: str, tmp_path: Path, main: Main) -> None:
    build, model, _ = kept(name)
    build().save_pretrained(tmp_path / "base")
    answers(main, build, saved(model, tmp_path / "adapter"), tmp_path / "base", tmp_path / "full")


@pytest.mark.parametrize(
    ("build", "fields"),
    [
        (llama, {"use_dora": True, "target_modules": ["q_proj", "down_proj"]}),
        (gpt2, {"use_dora": True, "target_modules": ["c_attn"], "fan_in_fan_out": True}),
        (tied_llama, {}),
    ],
    ids=["DoRA", "DoRA of Conv1D", "tied"],
)  # fmt: skip
def test_what_needs_the_base_is_merged_with_it(
    build: Callable[[], Any], fields: dict[str, Any], tmp_path: Path, main: Main
) -> None:
    """DoRA, m (W + s B A) / ||W + s B A||, by peft; and a linear layer of a base that ties two others."""
    answers(main, build, *small(tmp_path, build=build, **fields), tmp_path / "full")


def test_a_classifier_brings_its_head_and_its_classes(tmp_path: Path, main: Main) -> None:
    """A base of two labels without a head of three: the adapter's head and labels.json make the result's."""
    adapter, base = small(tmp_path, build=bert, task_type="SEQ_CLS", target_modules=["query"])
    (adapter / "labels.json").write_text(json.dumps({"num_labels": 3, "id2label": {"0": "a", "1": "b", "2": "c"}}))
    rewrite(base, lambda t: [t.pop(key) for key in list(t) if key.startswith("classifier")])
    reconfigure(base, id2label={"0": "x", "1": "y"}, label2id={"x": 0, "y": 1})
    done = main("export", adapter, "--format", "merged", "--model", base, "-o", tmp_path / "full")
    assert done.code == 0, done.err
    full = AutoModelForSequenceClassification.from_pretrained(tmp_path / "full").eval()
    torch.testing.assert_close(logits(full), logits(loaded(bert, adapter).eval()), rtol=0, atol=1e-5)
    assert full.config.id2label == {0: "a", 1: "b", 2: "c"}
    (adapter / "labels.json").write_text(json.dumps({"num_labels": 2, "id2label": {"0": "a", "1": "b"}}))
    assert main("validate", adapter, "--model", base).code == 0  # the head's rows count, not the names


# ---- what rounding costs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 0.2), (torch.float32, 1e-2)], ids=str)
def test_what_rounding_loses_is_measured(dtype: torch.dtype, scale: float, tmp_path: Path, main: Main) -> None:
    """bfloat16 has 8 bits, float32 24: what the written weights lack of W + s B A is recomputed here in float64."""
    adapter, base = small(tmp_path, dtype)
    rewrite(adapter, lambda t: t.update({key: t[key] * scale for key in t}))
    done = main("export", "--format", "merged", adapter, "--model", base, "-o", tmp_path / "full", "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)["rounding"]
    before, after = (safetensors.torch.load_file(tmp_path / k / "model.safetensors") for k in ("base", "full"))
    pairs = safetensors.torch.load_file(adapter / "adapter_model.safetensors")
    lost = size = 0.0
    for name in (f"model.layers.{k}.self_attn.q_proj" for k in range(2)):
        B, A = (pairs[f"base_model.model.{name}.lora_{f}.weight"].double() for f in "BA")
        update = 2 * B @ A  # lora_alpha 4, r 2
        off = after[f"{name}.weight"].double() - before[f"{name}.weight"].double() - update
        lost, size = lost + float(off.square().sum()), size + float(update.square().sum())
    assert told["loss"] == pytest.approx((lost / size) ** 0.5, rel=1e-3) and lost > 0


def test_an_update_that_rounding_swallows_is_told(tmp_path: Path, main: Main) -> None:
    adapter, base = small(tmp_path, torch.bfloat16)
    rewrite(adapter, lambda t: t.update({key: t[key] * 1e-3 for key in t}))
    done = main("export", "--format", "merged", adapter, "--model", base, "-o", tmp_path / "narrow")
    assert done.code == 0 and "in 2 layers" in done.err, done.err
    done = main("export", "--format", "merged", adapter, "--model", base, "-o", tmp_path / "wide", "--dtype", "float32")
    assert done.code == 0 and "2 layers" not in done.err, done.err


def test_a_number_beyond_float16_is_refused_by_name(tmp_path: Path, main: Main) -> None:
    """65504 is float16's largest; float32 holds what comes out."""
    adapter, base = small(tmp_path, torch.float16)
    key = "base_model.model.model.layers.1.self_attn.q_proj.lora_{}.weight"
    rewrite(
        adapter, lambda t: t.update({key.format("A"): torch.ones(2, 32), key.format("B"): torch.full((32, 2), 25e3)})
    )
    done = main("export", "--format", "merged", adapter, "--model", base, "-o", tmp_path / "full")
    assert done.code == 2 and re.search(r"layers.1.self_attn.q_proj.weight.* 65504.*--dtype float32", done.err)
    assert not (tmp_path / "full").exists()


def test_another_base_than_the_adapter_names_is_told(tmp_path: Path, main: Main) -> None:
    """The base here is the folder `base`: a name that ends so may be its name on the hub."""
    adapter, base = small(tmp_path)
    for named, notes in (("org/other", 1), (str(tmp_path), 1), ("org/base", 0), (str(base), 0)):
        reconfigure(adapter, base_model_name_or_path=named)
        done = main("validate", adapter, "--model", base, "--json")
        assert done.code == 0 and len(json.loads(done.out)[str(adapter)]["notes"]) == notes
    reconfigure(adapter, base_model_name_or_path="org/other")
    for kind in ("merged", "gguf"):
        done = main("export", adapter, "--format", kind, "--model", base, "-o", tmp_path / kind)
        assert done.code == 0 and "org/other" in done.err and done.err.count("\n") == 1, done.err
    reconfigure(adapter, base_model_name_or_path="org/base")
    for named, notes in (("org/base@main", 0), ("org/other@main", 1)):  # on the hub, and downloaded
        assert len(other_base(AdapterFile(adapter), named, tmp_path / "snapshot")) == notes


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_an_adapter_of_another_model_is_refused(tmp_path: Path, main: Main) -> None:
    adapter, base = small(tmp_path)
    _, other = small(tmp_path / "gpt2", build=gpt2, target_modules=["c_attn"])
    refused(main, adapter, other, "has no module 'model.layers.0.self_attn.q_proj'.*merge_and_unload")
    rewrite(adapter, lambda t: t.update({key: t[key][:, :8].contiguous() for key in t if "lora_A" in key}))
    refused(main, adapter, base, r"q_proj.*\(2, 8\) in the file and \(2, 32\) in peft")


def test_a_tied_weight_is_refused(tmp_path: Path, main: Main) -> None:
    """The output layer is the table of embeddings: merged, both would change."""
    adapter, base = small(tmp_path, build=tied_llama, target_modules=["lm_head"])
    refused(main, adapter, base, "ties to 'model.embed_tokens.weight'.*tie_word_embeddings")


def test_a_base_that_lacks_numbers_is_refused(tmp_path: Path, main: Main) -> None:
    """transformers would make them up, with a warning that nobody reads."""
    adapter, base = small(tmp_path)
    rewrite(base, lambda t: t.pop("model.layers.0.mlp.down_proj.weight"))
    done = main("export", "--format", "merged", adapter, "--model", base, "-o", tmp_path / "full")
    assert done.code == 2 and "needs 'model.layers.0.mlp.down_proj.weight'" in done.err
    assert done.err.count("\n") == 1 and not (tmp_path / "full").exists()


def test_a_damaged_base_is_refused_as_such(tmp_path: Path, main: Main) -> None:
    """A NaN in it is not the adapter's; nor is a file cut to half."""
    adapter, base = small(tmp_path)
    rewrite(base, lambda t: t["model.norm.weight"].fill_(torch.nan))
    done = main("export", adapter, "--format", "merged", "--model", base, "-o", tmp_path / "full")
    assert f"{base} holds NaN" in done.error() and "model.norm.weight" in done.error() and str(adapter) not in done.err
    weights = base / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    done = main("export", adapter, "--format", "merged", "--model", base, "-o", tmp_path / "full")
    assert f"base model in {base}" in done.complaint() and not (tmp_path / "full").exists()


def test_a_base_that_transformers_does_not_know_is_refused(tmp_path: Path, main: Main) -> None:
    adapter, base = small(tmp_path)
    reconfigure(base, model_type="somebodys", auto_map={"AutoModelForCausalLM": "theirs.Model"})
    refused(main, adapter, base, "transformers cannot build the base model")
    reconfigure(base, model_type="llama", auto_map={}, quantization_config={"quant_method": "gptq"})
    refused(main, adapter, base, "is quantised")


def test_a_wrong_merge_is_never_written(tmp_path: Path, main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    """peft's merge broken on purpose, for one layer of two: the answers differ, and no folder appears."""
    adapter, base = small(tmp_path)
    rewrite(adapter, lambda t: t.update({key: t[key] * 0.1 for key in t}))  # it moves the answers by a percent
    right, calls = Linear.merge, list[Any]()

    def broken(self: Any, **how: Any) -> None:
        calls.append(self)
        if len(calls) == 1:
            right(self, **how)

    monkeypatch.setattr(Linear, "merge", broken)
    done = main("export", "--format", "merged", adapter, "--model", base, "-o", tmp_path / "full")
    assert done.code == 2 and "answers to random tokens" in done.err and len(calls) == 2
    assert not (tmp_path / "full").exists()


def test_the_folder_is_complete(tmp_path: Path, main: Main) -> None:
    """The tokenizer's files and the licence come along."""
    adapter, base = small(tmp_path)
    (base / "tokenizer.json").write_text("{}")
    (base / "README.md").write_text("---\nlicense: mit\n---\n# Base\n")
    to = ["--model", base, "-o", tmp_path / "full"]
    assert main("export", adapter, "--format", "merged", *to).code == 0
    assert (tmp_path / "full" / "tokenizer.json").read_text() == "{}"
    assert "license: mit" in (tmp_path / "full" / "README.md").read_text()
