"""Which way round base models keep their weights. Kinds of evidence: oracle (transformers' own source and modules,
peft's shapes) and hand-computed."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from fedlora.adapters.architecture import Architecture, known
from fedlora.adapters.layouts import Layout
from fedlora.adapters.orientation import is_transposed
from fedlora.errors import AdapterFormatError
from support import transformers_tables
from support.command_line import Said
from support.peft_cases import randomise
from support.tiny_models import TOKENS, gpt2, llama

pytestmark = pytest.mark.filterwarnings("ignore")

_SMALL = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 16,
}  # fmt: skip
_GPT = {"vocab_size": 40, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**_GPT, add_cross_attention=True)),
    "openai-gpt": lambda: transformers.OpenAIGPTLMHeadModel(transformers.OpenAIGPTConfig(**_GPT)),
    "imagegpt": lambda: transformers.ImageGPTModel(transformers.ImageGPTConfig(**_GPT)),
    "decision_transformer": lambda: transformers.DecisionTransformerModel(
        transformers.DecisionTransformerConfig(hidden_size=16, n_layer=1, n_head=2, n_positions=16, vocab_size=40)
    ),
    "gpt_bigcode": lambda: transformers.GPTBigCodeForCausalLM(transformers.GPTBigCodeConfig(**_GPT)),
    "ctrl": lambda: transformers.CTRLLMHeadModel(
        transformers.CTRLConfig(vocab_size=40, n_positions=16, n_embd=16, dff=24, n_layer=1, n_head=2)
    ),
    "gptj": lambda: transformers.GPTJForCausalLM(transformers.GPTJConfig(**_GPT, rotary_dim=4)),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SMALL)),
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**_SMALL)),
    "t5": lambda: transformers.T5Model(
        transformers.T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2)
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**_SMALL, num_local_experts=3)),
    "qwen3_moe": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**_SMALL, num_experts=3, moe_intermediate_size=12, head_dim=8)
    ),
    "gpt_oss": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**_SMALL, num_local_experts=3, head_dim=8, num_experts_per_tok=2)
    ),
    "llama4_text": lambda: transformers.Llama4ForCausalLM(
        transformers.Llama4TextConfig(**_SMALL, num_local_experts=3, intermediate_size_mlp=24, head_dim=8)
    ),
    "dbrx": lambda: transformers.DbrxForCausalLM(
        transformers.DbrxConfig(
            vocab_size=40, d_model=16, n_heads=2, n_layers=1, max_seq_len=16,
            ffn_config={"ffn_hidden_size": 12, "moe_num_experts": 3, "moe_top_k": 2},
            attn_config={"kv_n_heads": 1, "rope_theta": 1e4, "clip_qkv": 8},
        )
    ),
    "granitemoe": lambda: transformers.GraniteMoeForCausalLM(
        transformers.GraniteMoeConfig(**_SMALL, num_local_experts=3, num_experts_per_tok=2)
    ),
}  # fmt: skip


@functools.cache
def _model(name: str) -> Any:
    with torch.device("meta"):
        return MODELS[name]()


def test_the_table_is_that_of_the_installed_transformers() -> None:
    """Made anew from its source, as far as that takes no second: types, Conv1D layers, transposed experts, ties."""
    types = known()["types"]
    assert set(transformers_tables.CONFIG_MAPPING_NAMES) == set(types)
    packages = {
        t: transformers_tables.package_of(t) for t in (*MODELS, "clvp", "aria", "wavlm", "mamba", "gemma3_text")
    }
    for t, package in packages.items():
        assert known()["conv1d"].get(t, []) == transformers_tables.conv1d_layers(package), t
        assert (t in known()["transposed_experts"]) == transformers_tables.transposed_experts(package), t
        assert known()["embeddings"].get(t, []) == transformers_tables.embeddings(package), t
        assert known()["read_weights"].get(t, []) == transformers_tables.read_weights(package), t
        assert known()["tied"].get(t, {}) == transformers_tables.tied(package), t
        assert known()["tied_within"].get(t, {}) == transformers_tables.inner_ties(package), t
        assert not set(known()["conv1d"].get(t, [])) & transformers_tables.linear_layers(package), t
    text = {
        path.parent.name
        for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
        if re.search(r"\bConv1D\(", path.read_text())
    }
    assert text - {"convbert"} == {transformers_tables.package_of(t) for t in known()["conv1d"]}  # its SeparableConv1D


@pytest.mark.parametrize("name", MODELS)
def test_the_table_agrees_with_the_modules_of_real_models(name: str) -> None:
    """Every Conv1D is named, no linear layer is, and is_transposed is what peft will find on the experts."""
    model = _model(name)
    architecture = Architecture({"model_type": model.config.model_type}, {})
    assert architecture.is_known
    for path, module in model.named_modules():
        leaf = path.rpartition(".")[2]
        if isinstance(module, Conv1D):
            assert architecture.conv1d(leaf) is True, path
        if isinstance(module, nn.Linear):
            assert architecture.conv1d(leaf) is False, path
        if any(p.dim() == 3 for p in module.parameters(recurse=False)) and "expert" in path:
            assert architecture.experts_in_first is getattr(module, "is_transposed", False), path


LINEAR, CONV, TABLE = Layout(), Layout("conv", kernel=(3, 2)), Layout("embedding")


def _experts(count: int) -> Layout:
    return Layout("parameter", experts=count)


GPT2, LLAMA, UNKNOWN, NONE = ({"model_type": "gpt2"}, {"model_type": "llama"}, {"model_type": "mine"}, {})
FITS: list[tuple[Any, str, Layout, tuple[int, int], tuple[int, ...], bool | str]] = [
    (LLAMA, "q_proj", LINEAR, (6, 4), (6, 4), False),
    (LLAMA, "q_proj", LINEAR, (4, 6), (6, 4), "is needed"),  # what was accepted before
    (LLAMA, "q_proj", LINEAR, (6, 6), (6, 6), False),
    (LLAMA, "c_proj", LINEAR, (6, 6), (6, 6), False),
    (GPT2, "c_proj", LINEAR, (6, 6), (6, 6), True),
    (GPT2, "c_attn", LINEAR, (12, 4), (4, 12), True),
    (GPT2, "c_attn", LINEAR, (4, 12), (4, 12), "Conv1D"),
    (GPT2, "lm_head", LINEAR, (12, 4), (12, 4), False),
    (GPT2, "lm_head", LINEAR, (12, 4), (4, 12), "is needed"),
    (UNKNOWN, "q_proj", LINEAR, (6, 4), (6, 4), False),
    (UNKNOWN, "q_proj", LINEAR, (4, 6), (6, 4), "is needed"),
    (UNKNOWN, "q_proj", LINEAR, (6, 6), (6, 6), "square"),
    (NONE, "q_proj", LINEAR, (6, 6), (6, 6), "square"),
    ({"model_type": ["gpt2"]}, "c_proj", LINEAR, (6, 6), (6, 6), "square"),
    ({"model_type": "blip-2", "text_config": GPT2}, "c_proj", LINEAR, (6, 6), (6, 6), "square"),
    ({"model_type": "blip-2", "text_config": GPT2}, "c_fc", LINEAR, (12, 4), (4, 12), True),
    ({"model_type": "blip-2", "text_config": GPT2}, "q_proj", LINEAR, (6, 6), (6, 6), False),
    ({"model_type": "blip-2", "text_config": GPT2}, "q_proj", LINEAR, (4, 6), (6, 4), "is needed"),
    (LLAMA, "x", LINEAR, (6, 4), (6, 4, 1), "matrix"),
    (LLAMA, "x", CONV, (5, 18), (5, 3, 3, 2), False),
    (LLAMA, "x", CONV, (5, 18), (5, 3, 2, 3), "kernel"),
    (LLAMA, "x", CONV, (5, 18), (5, 18), "kernel"),
    (LLAMA, "embed_tokens", TABLE, (4, 9), (9, 4), True),
    (LLAMA, "embed_tokens", TABLE, (9, 4), (9, 4), "embedding"),
    (LLAMA, "embed_tokens", TABLE, (4, 4), (4, 4), True),
    ({"model_type": "mixtral"}, "experts", _experts(3), (8, 6), (3, 8, 6), False),
    ({"model_type": "mixtral"}, "experts", _experts(3), (6, 8), (3, 8, 6), "d_out, d_in"),
    ({"model_type": "mixtral"}, "experts", _experts(3), (6, 6), (3, 6, 6), False),
    ({"model_type": "mixtral"}, "experts", _experts(2), (8, 6), (3, 8, 6), "2 experts"),
    ({"model_type": "gpt_oss"}, "experts", _experts(3), (8, 6), (3, 6, 8), True),
    ({"model_type": "gpt_oss"}, "experts", _experts(3), (6, 8), (3, 6, 8), "d_in, d_out"),
    ({"model_type": "gpt_oss"}, "experts", _experts(3), (6, 6), (3, 6, 6), True),
    ({"model_type": "qwen3_vl_moe"}, "experts", _experts(3), (8, 6), (3, 6, 8), True),  # transposed when it is loaded
    ({"model_type": "qwen3_vl_moe"}, "experts", _experts(3), (8, 6), (3, 8, 6), False),
    (UNKNOWN, "experts", _experts(3), (6, 6), (3, 6, 6), "square"),
    (NONE, "experts", _experts(3), (8, 6), (3, 6, 8), True),
    (GPT2, "c_attn", _experts(1), (4, 12), (4, 12), False),  # its weight as a bare parameter: as it is stored
    (GPT2, "c_attn", _experts(1), (12, 4), (4, 12), "matrix"),
]  # fmt: skip


@pytest.mark.quick(23)
@pytest.mark.parametrize("given", FITS, ids=lambda x: f"{x[0].get('model_type')}-{x[1]}-{x[2].kind}-{x[3]}-{x[4]}")
def test_an_update_fits_one_way_round_or_is_refused(given: Any) -> None:
    """By hand, from the table at the head of orientation.py."""
    config, leaf, layout, update, weight, want = given
    ask = functools.partial(is_transposed, Architecture(config, {}), f"m.{leaf}.weight", layout, update, weight)
    if isinstance(want, str):
        with pytest.raises(AdapterFormatError, match=want):
            ask()
    else:
        assert ask() is want


MOES = ("gpt_oss", "llama4_text")  # whose experts lie on the disk as in memory


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("name", MOES)
def test_experts_are_changed_as_peft_changes_them(
    name: str, square: bool, tmp_path: Path, main: Callable[..., Said]
) -> None:
    """peft with the adapter beside the model, in float64; square experts too, which only the type tells."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        size = {"hidden_size": 12, "intermediate_size": 12} if square else {}
        base_config = _model(name).config.to_dict() | size
        config = type(_model(name).config)(**base_config)
        config._experts_implementation = "eager"
        model = type(_model(name))(config).double().eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(tmp_path / "base")
    peft_model = get_peft_model(
        model, LoraConfig(r=2, lora_alpha=5, target_modules=[], target_parameters=["experts.down_proj"])
    ).eval()
    randomise(peft_model, 3)
    peft_model.save_pretrained(tmp_path / "adapter")
    eager = {"experts_implementation": "eager"}
    again = type(model).from_pretrained(tmp_path / "base", **eager)
    with torch.no_grad():
        plain = again(TOKENS).logits
        want = PeftModel.from_pretrained(again, tmp_path / "adapter").eval()(TOKENS).logits
    assert float((want - plain).abs().max()) > 1e-3
    done = main("apply", tmp_path / "adapter", "--base", tmp_path / "base", "-o", tmp_path / "full")
    assert done.code == 0, done.err
    with torch.no_grad():
        got = type(model).from_pretrained(tmp_path / "full", **eager).eval()(TOKENS).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


def test_a_swapped_adapter_is_refused(tmp_path: Path, main: Callable[..., Said]) -> None:
    """A and B of a linear layer exchanged and turned: the update turned round, which once was accepted."""
    llama().save_pretrained(tmp_path / "base")  # type: ignore[operator]
    peft_model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["v_proj"]))
    peft_model.save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(path)
    turned = {
        key.replace("lora_A", "X").replace("lora_B", "lora_A").replace("X", "lora_B"): t.T.contiguous()
        for key, t in tensors.items()
    }
    safetensors.torch.save_file(turned, path)
    for command in (["apply", tmp_path / "adapter", "-o", tmp_path / "full"], ["validate", tmp_path / "adapter"]):
        done = main(*command, "--base", tmp_path / "base")
        assert done.code == 2 and "a linear layer, (d_out, d_in) is needed" in done.err and done.err.count("\n") == 1
        assert not (tmp_path / "full").exists()


def test_a_square_layer_of_an_unknown_type_is_refused(tmp_path: Path, main: Callable[..., Said]) -> None:
    """GPT-2's square c_proj, under a name that is not known, or without a config.json."""
    gpt2().save_pretrained(tmp_path / "base")  # type: ignore[operator]
    get_peft_model(gpt2(), LoraConfig(r=2, target_modules=["c_proj"])).save_pretrained(tmp_path / "adapter")
    config = tmp_path / "base" / "config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps(content | {"model_type": "mine"}))
    done = main("apply", tmp_path / "adapter", "--base", tmp_path / "base", "-o", tmp_path / "full")
    assert done.code == 2 and "of type mine keeps" in done.err
    config.unlink()
    done = main("validate", tmp_path / "adapter", "--base", tmp_path / "base")
    assert done.code == 2 and "without a model_type in a config.json" in done.err


def test_a_layer_that_the_code_reads_past_is_refused(tmp_path: Path, main: Callable[..., Said]) -> None:
    """WavLM hands q_proj.weight to torch's attention: peft's adapter changes nothing there, merged it would."""
    config = transformers.WavLMConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, conv_dim=(8,),
        conv_stride=(4,), conv_kernel=(8,), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        num_feat_extract_layers=1,
    )  # fmt: skip
    model = transformers.WavLMModel(config).eval()
    model.save_pretrained(tmp_path / "base")
    sound = torch.randn(1, 400, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = model(sound).last_hidden_state
        peft_model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).eval()
        randomise(peft_model, 1)
        assert torch.equal(peft_model(sound).last_hidden_state, plain)
    peft_model.save_pretrained(tmp_path / "adapter")
    done = main("apply", tmp_path / "adapter", "--base", tmp_path / "base", "-o", tmp_path / "full")
    assert done.code == 2 and "uses past its layer" in done.err and done.err.count("\n") == 1


def test_an_embedding_and_a_linear_layer_are_told_apart() -> None:
    """Their shapes may be the same; peft would not load the one into the other."""
    for layout, name in ((LINEAR, "model.embed_tokens.weight"), (TABLE, "model.layers.0.self_attn.q_proj.weight")):
        with pytest.raises(AdapterFormatError, match="embedding"):
            is_transposed(Architecture(LLAMA, {}), name, layout, (6, 6), (6, 6))
