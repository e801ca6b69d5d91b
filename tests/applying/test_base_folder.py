"""The files of base models, and models with adapters written into them (`fedlora apply`). Kinds of evidence: oracle
(peft's own merge_and_unload, transformers' loading) and example-based (folders that are wrong in one way)."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from support.command_line import Said
from support.known_warnings import FUTURE_NAMES, LORA_BIAS
from support.tiny_models import bert, gpt2, llama

pytestmark = [FUTURE_NAMES, LORA_BIAS]

CASES = {
    "linear": (llama, {"target_modules": ["q_proj", "v_proj", "down_proj"]}),
    "Conv1D": (gpt2, {"target_modules": ["c_attn", "c_proj"]}),
    "embedding and head": (llama, {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    "bias": (bert, {"target_modules": ["query"], "bias": "all", "task_type": "SEQ_CLS"}),
    "lora_bias": (bert, {"target_modules": ["query"], "lora_bias": True, "task_type": "SEQ_CLS"}),
    "tokens": (llama, {"target_modules": ["q_proj"], "trainable_token_indices": [1, 5]}),
    "ranks": (bert, {"target_modules": ["query", "value"], "rank_pattern": {"value": 3}, "use_rslora": True}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_a_model_with_the_adapter_in_it_is_what_peft_makes(
    tmp_path: Path, main: Callable[..., Said], name: str, shards: bool
) -> None:
    """peft's merge_and_unload, tensor for tensor; the model loads in transformers, from one file or several shards."""
    kind, options = CASES[name]
    model: Any = kind()
    model.save_pretrained(tmp_path / "base", max_shard_size="20KB" if shards else "1GB")
    assert (tmp_path / "base" / "model.safetensors.index.json").exists() == shards
    peft_model = get_peft_model(model, LoraConfig(r=2, lora_alpha=5, **options))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in peft_model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    peft_model.save_pretrained(tmp_path / "adapter")
    done = main("apply", tmp_path / "adapter", "--base", tmp_path / "base", "-o", tmp_path / "full")
    assert done.code == 0, done.err
    auto = AutoModelForSequenceClassification if kind is bert else AutoModelForCausalLM
    got = auto.from_pretrained(tmp_path / "full").state_dict()
    base = auto.from_pretrained(tmp_path / "base")
    want = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        torch.testing.assert_close(got[key], tensor, rtol=1e-5, atol=1e-6, msg=key)
    assert main("validate", tmp_path / "adapter", "--base", tmp_path / "base").code == 0
    done = main("apply", tmp_path / "adapter", "--base", tmp_path / "base", "-o", tmp_path / "full")
    assert done.code == 2 and "is not empty" in done.err


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_of_another_model_is_refused_before_anything_is_written(
    tmp_path: Path, main: Callable[..., Said]
) -> None:
    gpt2().save_pretrained(tmp_path / "base")  # type: ignore[operator]
    get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    for command in (["apply", tmp_path / "adapter", "-o", tmp_path / "full"], ["validate", tmp_path / "adapter"]):
        done = main(*command, "--base", tmp_path / "base")
        assert done.code == 2 and "has no 'model.layers.0.self_attn.q_proj.weight'" in done.err
        assert not (tmp_path / "full").exists()
    done = main("validate", tmp_path / "adapter", "--base", tmp_path)
    assert done.code == 2 and "is no model directory" in done.err


@pytest.mark.filterwarnings("ignore")
def test_square_weights_and_two_biases(tmp_path: Path, main: Callable[..., Said]) -> None:
    """peft's own merge is the oracle: GPT-2's square Conv1D beside a linear head (its config then says fan_in_fan_out =
    false), and a bias that is replaced and added to; what cannot be written is refused."""
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "square": (gpt2, {"target_modules": ["c_proj", "lm_head"]}),
        "biases": (bert, {"target_modules": ["query"], "bias": "lora_only", "lora_bias": True}),
    }
    for name, (kind, options) in cases.items():
        model: Any = kind()
        if name == "square":
            model.config.tie_word_embeddings = False
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        model.save_pretrained(tmp_path / name / "base")
        peft_model = get_peft_model(model, LoraConfig(r=2, lora_alpha=5, **options))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in peft_model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        peft_model.save_pretrained(tmp_path / name / "adapter")
        done = main(
            "apply", tmp_path / name / "adapter", "--base", tmp_path / name / "base", "-o", tmp_path / name / "full"
        )
        assert done.code == 0, done.err
        auto = AutoModelForSequenceClassification if kind is bert else AutoModelForCausalLM
        got = auto.from_pretrained(tmp_path / name / "full").state_dict()
        base = auto.from_pretrained(tmp_path / name / "base")
        want = PeftModel.from_pretrained(base, tmp_path / name / "adapter").merge_and_unload().state_dict()
        for key, tensor in want.items():
            torch.testing.assert_close(got[key], tensor, rtol=1e-5, atol=1e-6, msg=key)


# ---- files -----------------------------------------------------------------------------------------------------------


def small(folder: Path, *, shards: bool = False) -> tuple[Path, Path]:
    """A base model, and an adapter of it."""
    model: Any = llama()
    model.save_pretrained(folder / "base", max_shard_size="20KB" if shards else "1GB")
    peft_model = get_peft_model(model, LoraConfig(r=2, lora_alpha=5, target_modules=["q_proj"]))
    peft_model.get_parameter("base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight").data.fill_(0.1)
    peft_model.save_pretrained(folder / "adapter")
    return folder / "adapter", folder / "base"


def listed(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.filterwarnings("ignore")
def test_what_lies_beside_the_weights_is_copied_or_named(tmp_path: Path, main: Callable[..., Said]) -> None:
    """Tokenizers and code are copied, byte for byte, the card is kept below the result's own; pickles, other
    weights, pipes, folders are named."""
    adapter, base = small(tmp_path)
    copied = {
        "tokenizer.json": "{}", "vocab.txt": "a", "merges.txt": "b", "spiece.model": "c", "README.md": "d",
        "LICENSE": "e",
        "chat_template.jinja": "f", "modeling_mine.py": "g", "special_tokens_map.json": "{}",
    }  # fmt: skip
    left = ("pytorch_model.bin", "model.pt", "model.pth", "last.ckpt", "a.pkl", "flax_model.msgpack", "tf_model.h5",
            "model.gguf", "model.onnx", "consolidated.00.safetensors", "odd\x1b[2J.txt", "unknown.xyz")  # fmt: skip
    for name, text in copied.items():
        (base / name).write_text(text)
    for name in left:
        (base / name).write_bytes(b"x")
    os.mkfifo(base / "pipe.json")
    (base / "onnx").mkdir()
    (base / "nowhere.json").symlink_to(base / "missing")
    done = main("apply", adapter, "--base", base, "-o", tmp_path / "full", "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)["left_out"]
    assert len(told) == len(left) + 3 and "\x1b" not in done.out
    for name in (*left, "pipe.json", "onnx", "nowhere.json"):
        assert any(line.startswith(name.replace("\x1b", "\\x1b")) for line in told), name
    assert listed(tmp_path / "full") == {*copied, "config.json", "generation_config.json", "model.safetensors"}
    for name, text in copied.items():
        written = (tmp_path / "full" / name).read_text()
        assert written == text if name != "README.md" else written.endswith(f"not of this model:\n\n{text}\n")
    again = main("apply", adapter, "--base", base, "-o", tmp_path / "full", "--force")
    assert again.code == 0 and "of the base model: " in again.err


@pytest.mark.filterwarnings("ignore")
def test_folders_of_further_modules_are_copied(tmp_path: Path, main: Callable[..., Said]) -> None:
    """sentence-transformers: poolings and dense layers, by modules.json; nothing else of their folders."""
    adapter, base = small(tmp_path)
    modules = [{"path": path} for path in ("", "1_Pooling", "2_Dense", "../outside", "/etc", "3_Missing", 7)]
    (base / "modules.json").write_text(json.dumps(modules))
    for name in ("1_Pooling", "2_Dense"):
        (base / name).mkdir()
        (base / name / "config.json").write_text("{}")
    (base / "2_Dense" / "model.safetensors").write_bytes(b"weights")
    (base / "2_Dense" / "pytorch_model.bin").write_bytes(b"pickle")
    done = main("apply", adapter, "--base", base, "-o", tmp_path / "full")
    assert done.code == 0, done.err
    assert "2_Dense/pytorch_model.bin" in done.err
    assert {"1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"} <= listed(tmp_path / "full")
    assert "2_Dense/pytorch_model.bin" not in listed(tmp_path / "full")


@pytest.mark.parametrize(
    "what", ["config.json", "tokenizer.json", "1_Pooling", "model.safetensors", "1_Pooling/a.json"]
)
@pytest.mark.filterwarnings("ignore")
def test_no_link_leads_out_of_the_base_model(what: str, tmp_path: Path, main: Callable[..., Said]) -> None:
    """What a link to another place leads to is neither read nor published."""
    adapter, base = small(tmp_path)
    secret = tmp_path / "secret"
    (secret / "1_Pooling").mkdir(parents=True)
    (secret / what).parent.mkdir(exist_ok=True)
    if what != "1_Pooling":
        (secret / what).write_text('{"secret": "word"}')
    (base / "modules.json").write_text('[{"path": "1_Pooling"}]')
    if "/" in what:
        (base / "1_Pooling").mkdir()
    (base / what).unlink(missing_ok=True)
    (base / what).symlink_to(secret / what)
    for command in (["apply", adapter, "-o", tmp_path / "full"], ["validate", adapter]):
        done = main(*command, "--base", base)
        assert done.code == 2 and "link to another place" in done.err and done.err.count("\n") == 1
    assert not (tmp_path / "full").exists()


@pytest.mark.filterwarnings("ignore")
def test_a_model_in_the_hubs_cache_is_applied_to(tmp_path: Path, main: Callable[..., Said]) -> None:
    """models--a--b/snapshots/REVISION of links into models--a--b/blobs: what they lead to is copied, no link."""
    adapter, plain = small(tmp_path)
    (plain / "1_Pooling").mkdir()
    (plain / "1_Pooling" / "config.json").write_text("{}")
    (plain / "modules.json").write_text('[{"path": "1_Pooling"}]')
    home = tmp_path / "models--a--b" / "snapshots" / "0123"
    (tmp_path / "models--a--b" / "blobs").mkdir(parents=True)
    for k, name in enumerate(sorted(listed(plain))):
        blob = tmp_path / "models--a--b" / "blobs" / f"{k:040x}"
        shutil.copy(plain / name, blob)
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).symlink_to(os.path.relpath(blob, (home / name).parent))
    assert main("apply", adapter, "--base", plain, "-o", tmp_path / "x").code == 0
    assert main("apply", adapter, "--base", home, "-o", tmp_path / "y").code == 0
    assert listed(tmp_path / "x") == listed(tmp_path / "y")
    for name in listed(tmp_path / "x"):
        assert not (tmp_path / "y" / name).is_symlink()
        assert (tmp_path / "y" / name).read_bytes() == (tmp_path / "x" / name).read_bytes(), name


def _index(base: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = base / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a tensor in another file": (
        lambda base: _index(base, lambda x: x["weight_map"].update(dict(zip(
            x["weight_map"], reversed(x["weight_map"].values()), strict=True)))),
        "contradict each other",
    ),
    "a tensor that is nowhere": (
        lambda base: _index(base, lambda x: x["weight_map"].update({"no.weight": min(x["weight_map"].values())})),
        "contradict each other",
    ),
    "a tensor that the index leaves out": (
        lambda base: _index(base, lambda x: x["weight_map"].pop("model.norm.weight")), "contradict each other",
    ),
    "a file elsewhere": (
        lambda base: _index(base, lambda x: x["weight_map"].update({"lm_head.weight": "../model.safetensors"})),
        "no file of weights",
    ),
    "a file that is missing": (lambda base: sorted(base.glob("model-*"))[1].unlink(), "is missing"),
    "an index of a list": (lambda base: _index(base, lambda x: x.update(weight_map=["a"])), "weight_map"),
    "no index": (lambda base: (base / "model.safetensors.index.json").unlink(), "is no model directory"),
    "a shard twice": (
        lambda base: (shutil.copy(min(base.glob("model-*")), base / "model-again.safetensors"),
                      _index(base, lambda x: x["weight_map"].update({"z": "model-again.safetensors"}))),
        "both hold",
    ),
    "a config that is a pipe": (
        lambda base: ((base / "config.json").unlink(), os.mkfifo(base / "config.json")), "no ordinary file",
    ),
    "an adapter's folder": (lambda base: (base / "adapter_config.json").write_text("{}"), "but an adapter's"),
    "bitsandbytes, by config": (
        lambda base: _config(base, quantization_config={"load_in_4bit": True}), r"quantised \(.*bitsandbytes",
    ),
    "GPTQ, by config": (lambda base: _config(base, quantization_config={"quant_method": "gptq"}), r"quantised .*gptq"),
}  # fmt: skip


def _config(base: Path, **more: Any) -> None:
    path = base / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.filterwarnings("ignore")
def test_a_base_model_that_contradicts_itself_is_refused(what: str, tmp_path: Path, main: Callable[..., Said]) -> None:
    adapter, base = small(tmp_path, shards=True)
    breaking, why = BROKEN[what]
    breaking(base)
    for command in (["apply", adapter, "-o", tmp_path / "full"], ["validate", adapter]):
        done = main(*command, "--base", base)
        assert done.code == 2 and re.search(why, done.err) and done.err.count("\n") == 1, done.err
    assert not (tmp_path / "full").exists()


QUANTISED = {
    "bitsandbytes 4 bit": {"model.x.weight": torch.uint8, "model.x.weight.absmax": torch.float32},
    "bitsandbytes 8 bit": {"model.x.weight": torch.int8, "model.x.SCB": torch.float32},
    "GPTQ or AWQ": {"model.x.qweight": torch.int32, "model.x.qzeros": torch.int32},
    "fp8": {"model.x.weight_scale_inv": torch.float32},
    "compressed": {"model.x.weight_packed": torch.int32},
    "I8": {"model.x.weight": torch.int8},
}


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.filterwarnings("ignore")
def test_a_quantised_base_is_refused_by_its_kind(kind: str, tmp_path: Path, main: Callable[..., Said]) -> None:
    """By names and types of its tensors, where config.json does not tell."""
    adapter, base = small(tmp_path)
    tensors = safetensors.torch.load_file(base / "model.safetensors")
    more = {name: torch.zeros(4, 4).to(dtype) for name, dtype in QUANTISED[kind].items()}
    safetensors.torch.save_file(tensors | more, base / "model.safetensors")
    done = main("apply", adapter, "--base", base, "-o", tmp_path / "full")
    assert done.code == 2 and "is quantised (" in done.err and kind.split()[0] in done.err, done.err
    assert done.err.count("\n") == 1 and not (tmp_path / "full").exists()


@pytest.mark.filterwarnings("ignore")
def test_the_index_that_is_written_is_right(tmp_path: Path, main: Callable[..., Said]) -> None:
    """total_size: the bytes of all tensors, as transformers writes it; each tensor in the file that is named."""
    adapter, base = small(tmp_path, shards=True)
    assert main("apply", adapter, "--base", base, "-o", tmp_path / "full").code == 0
    index = json.loads((tmp_path / "full" / "model.safetensors.index.json").read_text())
    want = json.loads((base / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == want["metadata"]["total_size"]
    found = {
        name: path.name
        for path in (tmp_path / "full").glob("*.safetensors")
        for name in safetensors.torch.load_file(path)
    }
    assert found == index["weight_map"] and found.keys() == want["weight_map"].keys()


@pytest.mark.filterwarnings("ignore")
def test_the_result_may_not_lie_in_its_inputs(tmp_path: Path, main: Callable[..., Said]) -> None:
    adapter, base = small(tmp_path)
    before = listed(tmp_path)
    for out in (base, base / "full", adapter / "full", adapter, tmp_path):
        done = main("apply", adapter, "--base", base, "-o", out, "--force")
        assert done.code == 2 and done.err.count("\n") == 1, out
    done = main("apply", adapter, "--base", adapter, "-o", tmp_path / "full")
    assert done.code == 2 and "but an adapter's" in done.err
    assert listed(tmp_path) == before


@pytest.mark.filterwarnings("ignore")
def test_a_base_of_another_name_is_told(tmp_path: Path, main: Callable[..., Said]) -> None:
    adapter, base = small(tmp_path)
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "meta/one"}))
    _config(base, _name_or_path="mine/two")
    for command in (["apply", adapter, "-o", tmp_path / "full"], ["validate", adapter]):
        done = main(*command, "--base", base)
        assert done.code == 0 and re.search("^warning: .*'meta/one'", done.err, re.M)
        assert "calls itself 'mine/two'" in done.err
