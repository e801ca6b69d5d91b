"""Base models whose files name tensors otherwise than the model in memory. Evidence: oracle (peft, unmerged)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from support.command_line import Said
from support.peft_cases import randomise

pytestmark = pytest.mark.filterwarnings("ignore")

SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
}  # fmt: skip
IMAGE: dict[str, Any] = SIZES | {"image_size": 16, "patch_size": 8}


def vision(name: str, **fields: Any) -> Callable[[], Any]:
    kind = name.removesuffix("ForImageClassification").removesuffix("Model")
    return lambda: getattr(transformers, name)(getattr(transformers, f"{kind}Config")(**fields))


def llava() -> Any:
    parts = {
        "vision_config": transformers.CLIPVisionConfig(**IMAGE),
        "text_config": transformers.LlamaConfig(vocab_size=40, **SIZES, num_key_value_heads=1),
    }
    return transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(**parts, image_token_index=39))


def neox() -> Any:
    config = transformers.GPTNeoXConfig(vocab_size=40, **SIZES, max_position_embeddings=32)
    return transformers.GPTNeoXForCausalLM(config)


def mpt() -> Any:
    """Its config has a part whose model_type is empty."""
    fields = {"d_model": 16, "n_heads": 2, "n_layers": 1, "max_seq_len": 32, "vocab_size": 40}
    return transformers.MptForCausalLM(transformers.MptConfig(**fields))


STAGES: dict[str, Any] = {
    "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "mlp_ratios": [2, 2],
    "num_attention_heads": [1, 2], "patch_sizes": [3, 3], "strides": [2, 2],
}  # fmt: skip
MODELS: Mapping[str, Callable[[], Any]] = {
    "vit": vision("ViTForImageClassification", **IMAGE, num_labels=3),
    "vit, bare": vision("ViTModel", **IMAGE),
    "deit": vision("DeiTForImageClassification", **IMAGE),
    "beit": vision("BeitForImageClassification", **IMAGE),
    "segformer": vision("SegformerForImageClassification", **STAGES),
    "llava": llava,
    "neox": neox,
    "mpt": mpt,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("vit", {"target_modules": ["q_proj", "fc1"], "modules_to_save": ["classifier"]}),
    ("vit", {"target_modules": "all-linear", "bias": "all"}),
    ("vit, bare", {"target_modules": ["v_proj", "fc2", "o_proj"]}),
    ("deit", {"target_modules": ["q_proj", "fc2"]}),
    ("beit", {"target_modules": "all-linear"}),
    ("segformer", {"target_modules": "all-linear"}),
    ("llava", {"target_modules": r".*language_model.*(q_proj|down_proj)"}),
    ("llava", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    ("neox", {"target_modules": ["query_key_value"], "modules_to_save": ["lm_head"]}),
    ("neox", {"target_modules": ["lm_head", "embed_in"]}),
    ("mpt", {"target_modules": ["Wqkv", "out_proj"]}),
]


def prepared(name: str, folder: Path, **fields: Any) -> tuple[Any, Mapping[str, Tensor], Any]:
    """The class, inputs, and the answer with the adapter beside the model; both as their authors save them."""
    torch.manual_seed(1)
    model = MODELS[name]().double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder / "base")
    words = name in ("llava", "neox", "mpt")
    inputs = {
        "input_ids" if words else "pixel_values":
        torch.randint(0, 38, (2, 7)) if words else torch.randn(2, 3, 16, 16, dtype=torch.float64)
    }  # fmt: skip
    peft_model = get_peft_model(model, LoraConfig(r=2, **fields)).eval()
    randomise(peft_model, 1)
    peft_model.save_pretrained(folder / "adapter", save_embedding_layers=False)
    fresh = type(model).from_pretrained(folder / "base")
    return type(model), inputs, answered(PeftModel.from_pretrained(fresh, folder / "adapter").eval(), inputs)


@torch.no_grad()
def answered(model: Any, inputs: Mapping[str, Tensor]) -> Any:
    return model(**inputs)[0]


@pytest.mark.quick(3)
@pytest.mark.parametrize(("name", "fields"), CASES)
def test_models_that_transformers_renames_as_it_saves(
    name: str, fields: dict[str, Any], tmp_path: Path, main: Callable[..., Said]
) -> None:
    """The file keeps its names, nothing is added, and the model answers as peft does with the adapter beside it."""
    with torch.random.fork_rng(devices=[]):
        kind, inputs, want = prepared(name, tmp_path, **fields)
    done = main("export", "--for", "merged", tmp_path / "adapter", "--base", tmp_path / "base", "-o", tmp_path / "full")
    assert done.code == 0, done.err
    before, after = (safetensors.torch.load_file(tmp_path / f / "model.safetensors") for f in ("base", "full"))
    assert before.keys() == after.keys()
    loaded, told = kind.from_pretrained(tmp_path / "full", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    torch.testing.assert_close(answered(loaded.eval(), inputs), want, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "buffers"),
    [("BertForSequenceClassification", {"bert.embeddings.position_ids": torch.arange(32)[None]}),
     ("LlamaForCausalLM", {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(4) for n in range(2)})],
)  # fmt: skip
def test_old_buffers_are_listed_and_left_out(
    name: str, buffers: dict[str, Tensor], tmp_path: Path, main: Callable[..., Said]
) -> None:
    """Files of older transformers store buffers that today's classes compute: the outputs are peft's without them."""
    kind = getattr(transformers, name)
    sizes = SIZES | {"max_position_embeddings": 32, "vocab_size": 40}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = kind(kind.config_class(**sizes)).double().eval()
        inputs = {"input_ids": torch.randint(3, 38, (2, 7))}
    model.save_pretrained(tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    safetensors.torch.save_file(safetensors.torch.load_file(file) | buffers, file, {"format": "pt"})
    peft_model = get_peft_model(model, LoraConfig(r=2, target_modules=["query", "q_proj"])).eval()
    randomise(peft_model, 1)
    peft_model.save_pretrained(tmp_path / "adapter")
    want = answered(peft_model, inputs)
    given = (tmp_path / "adapter", "--base", tmp_path / "base", "--json")
    checked, done = main("validate", *given), main("export", "--for", "merged", *given, "-o", tmp_path / "full")
    assert checked.code == done.code == 0, done.err
    facts = next(iter(json.loads(checked.out).values()))
    for told in (facts, json.loads(done.out)):
        assert {line.split()[0] for line in told["left_out"]} >= set(buffers)
    loaded = kind.from_pretrained(tmp_path / "full").eval()
    torch.testing.assert_close(answered(loaded, inputs), want, rtol=0, atol=1e-10)


def test_a_tensor_under_two_names_is_refused(tmp_path: Path, main: Callable[..., Said]) -> None:
    """GPT-NeoX's head as embed_out and as lm_head: which of them loading takes is its order."""
    with torch.random.fork_rng(devices=[]):
        prepared("neox", tmp_path, target_modules=["lm_head"])
    file = tmp_path / "base" / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    safetensors.torch.save_file(tensors | {"lm_head.weight": tensors["embed_out.weight"] + 1}, file)
    done = main("export", "--for", "merged", tmp_path / "adapter", "--base", tmp_path / "base", "-o", tmp_path / "full")
    assert done.code and "under two names" in done.err and not (tmp_path / "full").exists()


def test_a_tensor_that_no_rule_finds_is_refused(tmp_path: Path, main: Callable[..., Said]) -> None:
    with torch.random.fork_rng(devices=[]):
        prepared("vit", tmp_path, target_modules=["q_proj"])
    file = tmp_path / "base" / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors = {k.replace("attention.query", "attention.asking"): t for k, t in tensors.items()}
    safetensors.torch.save_file(tensors, file)
    done = main("export", "--for", "merged", tmp_path / "adapter", "--base", tmp_path / "base", "-o", tmp_path / "full")
    assert done.code and re.search("q_proj.* neither its files", done.err), done.err
