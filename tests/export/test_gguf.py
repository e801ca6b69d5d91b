"""Adapters for llama.cpp (`fedlora export --format gguf`). Kinds of evidence: oracle (peft's own update of each layer).

The reader here shares no code with the writer: names by a table written by hand, rows put back one by one, and
B A alpha / r in float64. That llama.cpp itself answers so: tests/release/test_llama_cpp.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from peft.tuners.lora import LoraLayer
from transformers import LlamaForSequenceClassification, Qwen2Config, Qwen2ForCausalLM

from support.bases import rewrite, small
from support.command_line import Said
from support.peft_boundary import kept, loaded
from support.peft_models import saved
from support.tiny_models import VOCABULARY, gpt2, llama

pytestmark = pytest.mark.filterwarnings("ignore")
Main = Callable[..., Said]

# llama.cpp's name of a Llama block's tensor -> transformers'; from llama.cpp's file of tensor names.
NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
HEADS = {"attn_q": 4, "attn_k": 2}  # of the tiny Llama


def updates(file: Path, heads: dict[str, int] = HEADS) -> dict[str, np.ndarray[Any, Any]]:
    """transformers' name of a layer -> the update that llama.cpp computes for it, (d_out, d_in), rows put back."""
    reader = gguf.GGUFReader(file)

    def text(key: str) -> str:
        return bytes(reader.fields[key].parts[-1]).decode()

    assert text("general.type") == "adapter" and text("adapter.type") == "lora"
    alpha = float(reader.fields["adapter.lora.alpha"].parts[-1][0])
    stored = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type).astype("f8") for tensor in reader.tensors}
    found = {}
    for name in sorted(key.removesuffix(".weight.lora_a") for key in stored if key.endswith(".lora_a")):
        A, B = stored.pop(f"{name}.weight.lora_a"), stored.pop(f"{name}.weight.lora_b")
        scale = alpha / B.shape[1]
        block = re.fullmatch(r"blk\.(\d+)\.(\w+)", name)
        assert block, name
        delta = scale * (B @ A)
        if count := heads.get(block[2]):  # llama.cpp: rows 0, h/2, 1, h/2 + 1, ... of each head of h rows
            size = len(delta) // count
            back = np.empty_like(delta)
            for head in range(count):
                for row in range(size // 2):
                    for half in range(2):
                        back[head * size + half * size // 2 + row] = delta[head * size + 2 * row + half]
            delta = back
        found[f"model.layers.{block[1]}.{NAMES[block[2]]}"] = delta
    assert not stored
    return found


def of_peft(model: Any) -> dict[str, np.ndarray[Any, Any]]:
    layers = {
        name.removeprefix("base_model.model."): m for name, m in model.named_modules() if isinstance(m, LoraLayer)
    }
    return {name: layer.double().get_delta_weight("default").detach().numpy() for name, layer in layers.items()}


def same(got: dict[str, np.ndarray[Any, Any]], want: dict[str, np.ndarray[Any, Any]], rtol: float) -> None:
    assert got.keys() == want.keys()
    for name in want:
        size = np.abs(want[name]).max()
        assert size > 1e-3
        np.testing.assert_allclose(got[name], want[name], rtol=0, atol=rtol * size, err_msg=name)


@pytest.mark.parametrize("name", ["all-linear", "ranks by suffix", "alphas by suffix", "rsLoRA", "narrow"])
def test_llama_cpp_computes_pefts_update(name: str, tmp_path: Path, main: Main) -> None:
    """Every delta and scale of each kind; factors of 16 bits are copied."""
    _, model, _ = kept("list" if name == "narrow" else name)
    adapter = saved(model, tmp_path / "adapter")
    if name == "narrow":
        rewrite(adapter, lambda t: t.update({key: x.bfloat16() for key, x in t.items()}))
    llama().save_pretrained(tmp_path / "base")
    done = main("export", adapter, "--format", "gguf", "--model", tmp_path / "base", "-o", tmp_path / "g")
    assert done.code == 0, done.err
    same(updates(tmp_path / "g" / "adapter.gguf"), of_peft(loaded(llama, adapter)), 1e-6)


def test_narrow_types_are_written_and_their_rounding_is_told(tmp_path: Path, main: Main) -> None:
    """bfloat16 keeps 8 bits: each factor is off by at most 2^-9, and what is told is what is in the file."""
    adapter, base = small(tmp_path)
    model = loaded(llama, adapter)
    for dtype, most in (("bfloat16", 2.0**-8), ("float16", 2.0**-11)):
        out = tmp_path / dtype
        done = main("export", adapter, "--format", "gguf", "--model", base, "-o", out, "--dtype", dtype, "--json")
        assert done.code == 0, done.err
        got, want = updates(out / "adapter.gguf"), of_peft(model)
        off = np.sqrt(
            sum(np.square(got[n] - want[n]).sum() for n in want) / sum(np.square(d).sum() for d in want.values())
        )
        assert 0 < off < 2 * most and json.loads(done.out)["rounding"] == pytest.approx(off, rel=0.01)


def qwen() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, tie_word_embeddings=False))


def test_rows_of_other_architectures_stay(tmp_path: Path, main: Main) -> None:
    """Qwen 2: the same names, no order of q and k of its own."""
    adapter, base = small(tmp_path, build=qwen, target_modules=["q_proj", "k_proj", "down_proj"])
    done = main("export", adapter, "--format", "gguf", "--model", base, "-o", tmp_path / "g")
    assert done.code == 0 and "architecture qwen2" in done.out, done.err
    same(updates(tmp_path / "g" / "adapter.gguf", {}), of_peft(loaded(qwen, adapter)), 1e-6)


def test_what_llama_cpp_would_leave_out_is_named_before(tmp_path: Path, main: Main) -> None:
    """Saved modules, with the way to leave them out."""
    adapter, base = small(tmp_path, modules_to_save=["lm_head"])
    asked = ["export", adapter, "--format", "gguf", "--model", base, "-o", tmp_path / "g"]
    said = main(*asked).error()
    assert "has 1, such as 'lm_head.weight'" in said and "--heads drop" in said
    assert not (tmp_path / "g").exists()
    assert main("merge", adapter, "--heads", "drop", "-o", tmp_path / "less").code == 0
    asked[1] = tmp_path / "less"
    assert main(*asked).code == 0
    assert set(updates(tmp_path / "g" / "adapter.gguf")) == {f"model.layers.{k}.self_attn.q_proj" for k in range(2)}


def classifier() -> Any:
    return LlamaForSequenceClassification(llama().config)


def test_other_models_are_refused(tmp_path: Path, main: Main) -> None:
    adapter, base = small(tmp_path / "llama")
    other, of_other = small(tmp_path / "gpt2", build=gpt2, target_modules=["c_attn"])
    scorer, of_scorer = small(tmp_path / "scorer", build=classifier, target_modules=["score"])
    to = ["-o", tmp_path / "out"]
    for command, why in (
        ([other, "--format", "gguf", "--model", of_other], "is of type 'gpt2'; .* llama, mistral"),
        ([scorer, "--format", "gguf", "--model", of_scorer], "no tensor for 'score'"),
        ([adapter, "--format", "tgi", "--model", base], "merged, gguf"),
        ([adapter, "--format", "gguf", "--model", base, "--dtype", "float64"], "float16, bfloat16, float32"),
    ):
        assert re.search(why, main("export", *command, *to).error())
    assert not (tmp_path / "out").exists()
