"""Models with adapters written into them (`fedlora apply`). Kind of evidence: oracle (peft's own merge_and_unload)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
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
def test_square_weights_tied_heads_and_two_biases(tmp_path: Path, main: Callable[..., Said]) -> None:
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

    whole: Any = llama()
    whole.config.tie_word_embeddings = True
    whole.tie_weights()
    whole.save_pretrained(tmp_path / "tied-llama")
    peft_model = get_peft_model(whole, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"]))
    peft_model.save_pretrained(tmp_path / "embeds")
    done = main("apply", tmp_path / "embeds", "--base", tmp_path / "tied-llama", "-o", tmp_path / "no")
    assert done.code == 2 and "ties it to the embedding" in done.err and not (tmp_path / "no").exists()
