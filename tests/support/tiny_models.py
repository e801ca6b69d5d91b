"""Tiny transformers built from configs. Kind of evidence: none; models for end-to-end tests, without network.

Each call builds the model afresh from a fixed seed: two calls give the same weights, no test sees another's changes.
The weights are larger than a fresh model's, so that a wrong adapter shows in the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

VOCABULARY = 40
TOKENS = torch.arange(12).reshape(2, 6)
_SIZES = {"vocab_size": VOCABULARY, "initializer_range": 0.2}


def bert(layers: int = 1) -> nn.Module:
    """A classifier of 3 labels, hidden size 32. Linear layers with biases; the head is `classifier`. Most runs train
    it, for which a second layer would take nearly as long again."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, "num_attention_heads": 2}
    config = BertConfig(**_SIZES, **sizes, max_position_embeddings=16, num_labels=3)
    return _seeded(lambda: BertForSequenceClassification(config))


def bert_of_two_layers() -> nn.Module:
    return bert(2)


def distilbert() -> nn.Module:
    """A classifier of 3 labels with two modules behind the encoder, `pre_classifier` and `classifier`."""
    sizes = {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 2}
    config = DistilBertConfig(**_SIZES, **sizes, max_position_embeddings=16, num_labels=3)
    return _seeded(lambda: DistilBertForSequenceClassification(config))


def gpt2() -> nn.Module:
    """A language model whose layers are Conv1D: weights are stored (d_in, d_out). Hidden size 32, 2 layers."""
    config = GPT2Config(**_SIZES, n_embd=32, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0)
    return _seeded(lambda: GPT2LMHeadModel(config))


def llama() -> nn.Module:
    """A language model with grouped queries: k_proj and v_proj are (16, 32), q_proj is (32, 32)."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        **_SIZES, **heads, hidden_size=32, intermediate_size=48, num_hidden_layers=2, max_position_embeddings=16
    )
    return _seeded(lambda: LlamaForCausalLM(config))


def tied_llama() -> nn.Module:
    """The same, whose output layer is its table of embeddings."""
    model: Any = llama()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    return model


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    """What the model says to `TOKENS`."""
    return model(input_ids=TOKENS).logits


def _seeded(build: Callable[[], Any]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().eval()
