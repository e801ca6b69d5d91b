"""What the judgement refuses on top of transformers and peft. Kinds of evidence: oracle (peft's own silence, or what it
computes beside the model) and example-based (bases and adapters that are wrong in one way)."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from peft import PeftModel
from torch import Tensor

from support.bases import reconfigure, refused, rewrite, said, small
from support.command_line import Said
from support.tiny_models import TOKENS, bert, gpt2, llama

pytestmark = pytest.mark.filterwarnings("ignore")
PREFIX = "base_model.model.model.layers"
LM = {"input_ids": TOKENS}


def drop(part: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if part in key]:
            del tensors[key]

    return change


def turned(tensors: dict[str, Tensor]) -> None:
    """A and B exchanged: the update turned round, which once was accepted."""
    for key in [key for key in tensors if "lora_A" in key]:
        other = key.replace("lora_A", "lora_B")
        tensors[key], tensors[other] = tensors[other].T.contiguous(), tensors[key].T.contiguous()


# What -> (peft's fields, what is changed in the file, in its config, words of the refusal).
SILENCES: dict[str, tuple[dict[str, Any], Any, dict[str, Any], str]] = {
    "factors of another layer": (
        {}, lambda t: t.update({f"{PREFIX}.7.self_attn.q_proj.lora_{f}.weight": t[
            f"{PREFIX}.0.self_attn.q_proj.lora_{f}.weight"].clone() for f in "AB"}), {}, r"layers\.7.*another model"),
    "turned round": ({"target_modules": ["v_proj"]}, turned, {}, r"has shape \(2, 16\).* \(2, 32\)"),
    "saved embeddings of a longer vocabulary": (
        {"modules_to_save": ["embed_tokens"]}, lambda t: t.update({k: torch.ones(44, 32) for k in t if "embed" in k}),
        {}, r"\(44, 32\).* \(40, 32\).*vocabulary"),
}  # fmt: skip


@pytest.mark.parametrize("what", SILENCES)
def test_what_peft_passes_over_is_refused(what: str, tmp_path: Path, main: Callable[..., Said]) -> None:
    fields, change, config, why = SILENCES[what]
    adapter, base = small(tmp_path, **fields)
    if change is not None:
        rewrite(adapter, change)
    reconfigure(adapter, **config)
    refused(main, adapter, base, why)


def test_a_layer_that_the_base_lacks_is_not_made_up(tmp_path: Path, main: Callable[..., Said]) -> None:
    """An update of a missing matrix: a head or a layer that the base's file lacks. transformers draws such matrices at
    random, a new one each time."""
    adapter, base = small(tmp_path / "head", target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    llama().model.save_pretrained(base)
    rewrite(adapter, lambda t: [t.pop(k) for k in list(t) if "base_layer" in k])
    refused(main, adapter, base, r"lm_head\.weight.* invent its numbers")
    adapter, base = small(tmp_path / "lost")
    path = base / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    del tensors["model.layers.0.self_attn.q_proj.weight"]
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    refused(main, adapter, base, r"layers\.0\.self_attn\.q_proj\.weight.* invent its numbers")


def test_an_adapter_of_another_model_is_refused(tmp_path: Path, main: Callable[..., Said]) -> None:
    adapter, _ = small(tmp_path / "llama")
    _, base = small(tmp_path / "gpt2", build=gpt2, target_modules=["c_attn"])
    refused(main, adapter, base, r"GPT2LMHeadModel.* has no 'model\.layers\.0\.self_attn\.q_proj'")
    assert "is not a model directory" in main("validate", adapter, "--base", tmp_path).err


def test_an_unknown_type_or_code_of_its_own_is_refused(tmp_path: Path, main: Callable[..., Said]) -> None:
    adapter, base = small(tmp_path)
    reconfigure(base, model_type="mine")
    refused(main, adapter, base, "'mine', which transformers .* does not know.*merge_and_unload")
    (base / "configuration_mine.py").write_text("raise SystemExit('run')")
    reconfigure(base, auto_map={"AutoConfig": "configuration_mine.Mine"})
    refused(main, adapter, base, "auto_map.*runs no stranger's code")


ABSURD: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers' = 1,000,000,000"),
    "a vocabulary": ({"vocab_size": 2**40}, "vocab_size"),
    "classes": ({"num_labels": 10**9}, "num_labels"),
    "heads": ({"num_attention_heads": 10**6}, "num_attention_heads"),
    "another file": ({"transformers_weights": "../other.safetensors"}, "transformers_weights"),
    "other layers": ({"fusion_config": {"x": True}}, "fusion_config"),
    "other sizes": ({"intermediate_size": 49}, r"'model.layers.0.mlp.\w+.weight' as \("),
    "a word for a number": ({"hidden_size": "many"}, "config.json"),
    "one layer more": ({"num_hidden_layers": 3}, r"layers\.2\."),
}


@pytest.mark.parametrize("what", ABSURD)
def test_a_config_that_no_model_has_is_refused_soon(what: str, tmp_path: Path, main: Callable[..., Said]) -> None:
    """Before fedlora builds anything of that size, or at the limit."""
    config, why = ABSURD[what]
    adapter, base = small(tmp_path)
    begun = time.process_time()
    reconfigure(base, **config)
    refused(main, adapter, base, why)
    assert time.process_time() - begun < 20


def test_a_head_of_more_classes_than_anybody_has_is_refused_soon(tmp_path: Path, main: Callable[..., Said]) -> None:
    """transformers would make two dictionaries of as many names before it looks at a shape."""
    fields = {"target_modules": ["query"], "task_type": "SEQ_CLS"}
    adapter, base = small(tmp_path, build=bert, **fields)
    rows, of = 200_000, "base_model.model.classifier"
    rewrite(adapter, lambda t: t.update({f"{of}.weight": torch.ones(rows, 32), f"{of}.bias": torch.ones(rows)}))
    begun = time.process_time()
    refused(main, adapter, base, "200,000 outputs.* 100,000")
    assert time.process_time() - begun < 20


# ---- what peft computes beside the model, and merged weights would not -----------------------------------------------


def wavlm() -> Any:
    """Hands q_proj.weight to torch's attention."""
    sizes = {"conv_dim": (8,), "conv_stride": (4,), "conv_kernel": (8,), "num_feat_extract_layers": 1}
    return transformers.WavLMModel(
        transformers.WavLMConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
            num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, **sizes,
        )
    )  # fmt: skip


def opt() -> Any:
    """Its embedding of positions counts from 2."""
    return transformers.OPTForCausalLM(
        transformers.OPTConfig(
            vocab_size=40, hidden_size=16, ffn_dim=24, num_hidden_layers=1, num_attention_heads=2, init_std=0.3,
            max_position_embeddings=32, word_embed_proj_dim=16,
        )
    )  # fmt: skip


def siglip() -> Any:
    """Its pooling head is PyTorch's own attention."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**sizes, image_size=16, patch_size=8))


def test_a_layer_that_the_code_reads_past_is_refused(tmp_path: Path, main: Callable[..., Said]) -> None:
    """peft's adapter changes nothing there; merged it would."""
    adapter, base = small(tmp_path, build=wavlm)
    sound = {"input_values": torch.randn(1, 400, generator=torch.Generator().manual_seed(0))}
    model = transformers.WavLMModel.from_pretrained(base).eval()
    with torch.no_grad():
        plain = model(**sound).last_hidden_state
        beside = PeftModel.from_pretrained(model, adapter).eval()(**sound).last_hidden_state
    assert torch.equal(plain, beside)
    refused(main, adapter, base, "q_proj.weight', which .* reads without calling its layer")


def test_pytorchs_attention_is_refused(tmp_path: Path, main: Callable[..., Said]) -> None:
    """peft counts the update of out_proj not at all."""
    adapter, base = small(tmp_path, build=siglip, target_modules=r".*head\.attention\.out_proj")
    refused(main, adapter, base, "nn.MultiheadAttention")


def test_square_weights_and_a_head(tmp_path: Path, main: Callable[..., Said]) -> None:
    """GPT-2's square Conv1D beside a linear head (its config then says fan_in_fan_out = false), and a head."""
    for kind, fields in (
        (gpt2, {"target_modules": ["c_proj", "lm_head"]}),
        (bert, {"target_modules": ["query"], "task_type": "SEQ_CLS"}),
    ):
        adapter, base = small(tmp_path / kind.__name__, torch.float64, build=kind, **fields)
        model: Any = type(kind())
        want = said(PeftModel.from_pretrained(model.from_pretrained(base), adapter).eval(), LM)
        done = main("export", "--for", "merged", adapter, "--base", base, "-o", adapter.parent / "full")
        assert done.code == 0, done.err
        got = said(model.from_pretrained(adapter.parent / "full").eval(), LM)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-11)


# ---- the program checks itself ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["update", "file"])
def test_a_wrong_update_or_file_is_never_written(
    fault: str, tmp_path: Path, main: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update of peft's that the file does not say, and a tensor that is written otherwise than it was computed."""
    adapter, base = small(tmp_path)
    if fault == "update":
        from peft.tuners.lora.layer import Linear

        before = Linear.get_delta_weight
        monkeypatch.setattr(Linear, "get_delta_weight", lambda self, name: before(self, name) * 1.0001)
    else:
        write = transformers.PreTrainedModel.save_pretrained

        def spoiled(self: Any, *args: Any, **how: Any) -> None:
            self.model.norm.weight.data[3] += 1
            write(self, *args, **how)

        monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", spoiled)
    done = main("export", "--for", "merged", adapter, "--base", base, "-o", tmp_path / "full")
    assert done.code == 2 and "Nothing is written" in done.err and done.err.count("\n") == 1
    assert not (tmp_path / "full").exists()
