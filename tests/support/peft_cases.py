"""Two adapters of every kind that fedlora reads, and peft's own dense models of them: cases and oracle."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from support.tiny_models import TOKENS, VOCABULARY, bert, gpt2, llama

WEIGHTS = (0.7, 0.3)


def seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Gives the same float64 model every time, as a copy."""

    @functools.cache
    def once() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return build().double().eval()

    return lambda: copy.deepcopy(once())


def tied_llama() -> nn.Module:
    """A language model whose head is its table of embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.2, max_position_embeddings=16, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


LM: Mapping[str, Tensor] = {"input_ids": TOKENS}
CAUSAL = {"task_type": "CAUSAL_LM"}
SEQ = {"task_type": "SEQ_CLS", "target_modules": ["query", "value"]}


@dataclass(frozen=True)
class Case:
    """Two adapters of one base. one, two: fields of peft's config; `two` beside or instead of those of `one`."""

    build: Callable[[], nn.Module]
    one: Mapping[str, Any]
    two: Mapping[str, Any]
    inputs: Mapping[str, Tensor] = field(default_factory=lambda: LM)
    narrow: bool = False  # the files' tensors in bfloat16


def lora(
    build: Callable[[], nn.Module], one: Mapping[str, Any], two: Mapping[str, Any] | None = None, **more: Any
) -> Case:
    """Ranks 4 and 3, scalings 2 and 5/3, unless said otherwise."""
    defaults = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    return Case(build, defaults | one, defaults | one | {"r": 3, "lora_alpha": 5} | (two or {}), **more)


LLAMA, GPT2, BERT, TIED = (seeded(build) for build in (llama, gpt2, bert, tied_llama))

CASES = {
    "linear": lora(LLAMA, CAUSAL),
    "linear, no task type": lora(LLAMA, {}),
    "list, regex": lora(LLAMA, CAUSAL, {"target_modules": r".*\.1\.self_attn\.(k|v)_proj"}),
    "all-linear": lora(LLAMA, CAUSAL | {"target_modules": "all-linear"}),
    "rank and alpha patterns": lora(
        LLAMA, CAUSAL | {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"1.self_attn.q_proj": 3, "v_proj": 7}},
        {"rank_pattern": {"v_proj": 6}, "alpha_pattern": {}}),
    "rsLoRA": lora(LLAMA, CAUSAL | {"use_rslora": True}),
    "rsLoRA with patterns": lora(
        LLAMA, CAUSAL | {"use_rslora": True, "rank_pattern": {"q_proj": 6}, "alpha_pattern": {"v_proj": 7}},
        {"use_rslora": False}),
    "bfloat16": lora(lambda: LLAMA().float(), CAUSAL | {"alpha_pattern": {"v_proj": 7}}, narrow=True),
    "Conv1D": lora(GPT2, CAUSAL | {"target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True}),
    "lm_head": lora(LLAMA, CAUSAL | {"target_modules": ["lm_head", "v_proj"]}),
    "heads": lora(BERT, SEQ | {"modules_to_save": ["pooler"]}),
    "lm_head in full": lora(LLAMA, CAUSAL | {"modules_to_save": ["lm_head"]}),
    "tied, linear": lora(TIED, CAUSAL),
}  # fmt: skip


def randomise(model: nn.Module, seed: int) -> None:
    """Random numbers in everything that trains: no factor is zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def saved(case: Case, which: int, folder: Path) -> Path:
    fields = copy.deepcopy(dict((case.one, case.two)[which]))  # peft appends in place
    model = get_peft_model(case.build(), LoraConfig(**fields)).eval()
    randomise(model, which + 1)
    for name, parameter in model.named_parameters():
        if case.narrow and ".lora_" in name:
            parameter.data = parameter.data.bfloat16()
    model.create_or_update_model_card = lambda folder: None  # which takes peft longer than the rest
    model.save_pretrained(folder, save_embedding_layers=False)
    return folder


def loaded(case: Case, folder: Path) -> Any:
    return PeftModel.from_pretrained(case.build(), folder).eval()


def dense(case: Case, folder: Path) -> nn.Module:
    """The base with the adapter merged into it by peft."""
    model = loaded(case, folder)
    merged: nn.Module = model.merge_and_unload()
    return merged.eval()


def base_state(case: Case) -> dict[str, Tensor]:
    return {key: tensor.clone() for key, tensor in case.build().state_dict().items()}
