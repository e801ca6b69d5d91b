"""Adapters on embeddings and heads that are one tensor (tied). Kind of evidence: oracle (peft, unmerged, in float64).

Beside the model, an adapter changes one use of a tied tensor or all, by peft's rules; merged weights must do the same,
with the tensor written twice where they must, or the adapter is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GemmaConfig,
    GemmaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from support.command_line import Said
from support.peft_cases import TIED, randomise
from support.tiny_models import TOKENS, VOCABULARY, gpt2

pytestmark = pytest.mark.filterwarnings("ignore")


def bert_lm() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertForMaskedLM(
        BertConfig(vocab_size=VOCABULARY, initializer_range=0.2, max_position_embeddings=16, **sizes)
    )


def gemma() -> Any:
    """Scales its embeddings, and ties by default."""
    return GemmaForCausalLM(
        GemmaConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, initializer_range=0.2, max_position_embeddings=16,
        )
    )  # fmt: skip


def switch() -> Any:
    """Divides what its head gets where that is tied: UMT5 and UDOP do so too."""
    return transformers.SwitchTransformersForConditionalGeneration(
        transformers.SwitchTransformersConfig(
            vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_decoder_layers=2, num_heads=2,
            num_experts=2, decoder_start_token_id=0, initializer_factor=2.0, tie_word_embeddings=True,
        )
    )  # fmt: skip


def t5() -> Any:
    """One tensor for both embeddings and the head, whatever its config says."""
    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, initializer_factor=2.0)
    )


MODELS: Mapping[str, tuple[Callable[[], Any], str, str]] = {  # with the names of the embedding and of the head
    "llama": (TIED, "embed_tokens", "lm_head"),
    "gpt2": (gpt2, "wte", "lm_head"),
    "gemma": (gemma, "embed_tokens", "lm_head"),
    "bert": (bert_lm, "word_embeddings", "predictions.decoder"),
    "t5": (t5, "shared", "lm_head"),
    "switch": (switch, "shared", "lm_head"),
}
# EMBEDDING and HEAD stand for the names.
KINDS: Mapping[str, dict[str, Any]] = {
    "head": {"target_modules": ["HEAD"]},
    "embedding in full": {"modules_to_save": ["EMBEDDING"]},
    "head in full": {"modules_to_save": ["HEAD"]},
    "both in full": {"modules_to_save": ["EMBEDDING", "HEAD"]},
}


def named(value: Any, embedding: str, head: str) -> Any:
    if isinstance(value, str):
        return {"EMBEDDING": embedding, "HEAD": head}.get(value, value)
    if isinstance(value, dict):
        return {named(k, embedding, head): named(v, embedding, head) for k, v in value.items()}
    return [named(v, embedding, head) for v in value] if isinstance(value, list) else value


@torch.no_grad()
def said(model: Any) -> Tensor:
    more = {"decoder_input_ids": TOKENS.flip(1)} if model.config.is_encoder_decoder else {}
    found: Tensor = model(input_ids=TOKENS, **more).logits
    return found


@pytest.mark.quick(3)
@pytest.mark.parametrize("stored_twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_tied_weights_are_written_as_peft_computes_them_or_refused(
    name: str, kind: str, stored_twice: bool, tmp_path: Path, main: Callable[..., Said]
) -> None:
    build, embedding, head = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = build().double().eval()
    model.save_pretrained(tmp_path / "base")
    if stored_twice:
        state = {k: t.clone() for k, t in model.state_dict().items()}
        safetensors.torch.save_file(state, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    again = type(model).from_pretrained(tmp_path / "base")
    torch.testing.assert_close(said(again), said(model), rtol=0, atol=1e-12)
    fields: dict[str, Any] = {"r": 3, "lora_alpha": 4, "target_modules": []} | named(KINDS[kind], embedding, head)
    if not fields["target_modules"]:
        fields["target_modules"] = [
            "query" if name == "bert" else "c_attn" if name == "gpt2" else "q" if name in ("t5", "switch") else "q_proj"
        ]
    try:
        peft_model = get_peft_model(model, LoraConfig(**fields)).eval()
        randomise(peft_model, 1)
        peft_model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
        beside = PeftModel.from_pretrained(type(model).from_pretrained(tmp_path / "base"), tmp_path / "adapter").eval()
        want = said(beside)
    except (ValueError, RuntimeError, KeyError, AttributeError, TypeError) as error:
        pytest.skip(f"peft itself cannot: {str(error)[:100]}")
    done = main("export", "--for", "merged", tmp_path / "adapter", "--base", tmp_path / "base", "-o", tmp_path / "full")
    assert main("validate", tmp_path / "adapter", "--base", tmp_path / "base").code == done.code
    if done.code:
        assert done.err.count("\n") == 1 and not (tmp_path / "full").exists()
        assert name == "switch" and "SwitchTransformersForConditionalGeneration computes differently" in done.err
        return
    got = said(type(model).from_pretrained(tmp_path / "full").eval())
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
    config = json.loads((tmp_path / "full" / "config.json").read_text())
    assert ("tie_word_embeddings" in done.err) == (config.get("tie_word_embeddings") is False)


# Models whose flag ties more than a head and an embedding: (class, its config, fields, embedding, head, a layer).
BART = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
        "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "d_model": 16, "max_position_embeddings": 32}  # fmt: skip
BERT = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
        "max_position_embeddings": 32}  # fmt: skip
SMALL = {"dim": 16, "hidden_dim": 24, "n_layers": 1, "n_heads": 2, "max_position_embeddings": 32}
STARTS = {"pad_token_id": 1, "decoder_start_token_id": 1, "eos_token_id": 2}
MANY: Mapping[str, tuple[str, str, dict[str, Any], str, str, str]] = {
    "bart": ("BartForConditionalGeneration", "BartConfig", BART, "shared", "lm_head", "q_proj"),
    "bart, decoder": ("BartForCausalLM", "BartConfig", BART, "embed_tokens", "lm_head", "q_proj"),
    "bart, classes": ("BartForSequenceClassification", "BartConfig", BART, "shared", "embed_tokens", "q_proj"),
    "bart, answers": ("BartForQuestionAnswering", "BartConfig", BART, "shared", "embed_tokens", "q_proj"),
    "bart, bare": ("BartModel", "BartConfig", BART, "shared", "embed_tokens", "q_proj"),
    "mbart": ("MBartForConditionalGeneration", "MBartConfig", BART, "shared", "lm_head", "q_proj"),
    "pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", BART, "shared", "lm_head", "q_proj"),
    "m2m_100": ("M2M100ForConditionalGeneration", "M2M100Config", BART, "shared", "lm_head", "q_proj"),
    "blenderbot": ("BlenderbotForConditionalGeneration", "BlenderbotConfig", BART, "shared", "lm_head", "q_proj"),
    "plbart": ("PLBartForConditionalGeneration", "PLBartConfig", BART, "shared", "lm_head", "q_proj"),
    "mvp": ("MvpForConditionalGeneration", "MvpConfig", BART, "shared", "lm_head", "q_proj"),
    "marian": ("MarianMTModel", "MarianConfig", BART | STARTS, "shared", "lm_head", "q_proj"),
    "bert": ("BertForMaskedLM", "BertConfig", BERT, "word_embeddings", "decoder", "query"),
    "bert, pretraining": ("BertForPreTraining", "BertConfig", BERT, "word_embeddings", "decoder", "query"),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", BERT, "word_embeddings", "decoder", "query"),
    "albert": (
        "AlbertForMaskedLM", "AlbertConfig", BERT | {"embedding_size": 16}, "word_embeddings", "decoder", "query"
    ),
    "electra": (
        "ElectraForMaskedLM", "ElectraConfig", BERT | {"embedding_size": 16}, "word_embeddings",
        "generator_lm_head", "query",
    ),
    "distilbert": ("DistilBertForMaskedLM", "DistilBertConfig", SMALL, "word_embeddings", "vocab_projector", "q_lin"),
    "deberta": ("DebertaV2ForMaskedLM", "DebertaV2Config", BERT, "word_embeddings", "decoder", "query_proj"),
}  # fmt: skip
OF_MANY = ("head", "embedding in full", "head in full")


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", OF_MANY)
@pytest.mark.parametrize("name", MANY)
def test_the_end_of_one_tie_is_the_end_of_all(name: str, kind: str, tmp_path: Path, main: Callable[..., Said]) -> None:
    """tie_word_embeddings = false unties inner models and biases too: each of their tensors must then be in the file.
    The models say what is missing as they load; biases are no zeros, which a lost one would be."""
    made, configured, fields, embedding, head, layer = MANY[name]
    kind_of, config = getattr(transformers, made), getattr(transformers, configured)(vocab_size=VOCABULARY, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = kind_of(config).double().eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "base")
    inputs = {"input_ids": TOKENS}
    inputs |= {"decoder_input_ids": TOKENS.flip(1)} if "Conditional" in made or "Marian" in made else {}
    if "Sequence" in made:  # it asks for one end of text in each
        inputs = {"input_ids": TOKENS.masked_fill(TOKENS == 2, 3).index_fill(1, torch.tensor([-1]), 2)}

    @torch.no_grad()
    def answered(model: Any) -> Tensor:
        found: Tensor = model(**inputs)[0]
        return found

    wanted: dict[str, Any] = {"r": 3, "lora_alpha": 4, "target_modules": []} | named(KINDS[kind], embedding, head)
    wanted["target_modules"] = wanted["target_modules"] or [layer]
    try:
        peft_model = get_peft_model(model, LoraConfig(**wanted)).eval()
        randomise(peft_model, 1)
        peft_model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
        beside = PeftModel.from_pretrained(kind_of.from_pretrained(tmp_path / "base"), tmp_path / "adapter").eval()
        want = answered(beside)
    except (ValueError, RuntimeError, KeyError, AttributeError, TypeError) as error:
        pytest.skip(f"peft itself cannot: {str(error)[:100]}")
    done = main("export", "--for", "merged", tmp_path / "adapter", "--base", tmp_path / "base", "-o", tmp_path / "full")
    assert main("validate", tmp_path / "adapter", "--base", tmp_path / "base").code == done.code
    if done.code:
        assert done.err.count("\n") == 1 and not (tmp_path / "full").exists()
        assert name == "bart, bare", done.err
        return
    loaded, told = kind_of.from_pretrained(tmp_path / "full", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"], (told, done.err)
    torch.testing.assert_close(answered(loaded.eval()), want, rtol=0, atol=1e-10)
