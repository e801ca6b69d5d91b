"""Every pair of ordinary kinds of adapters, merged under every choice of --heads and --missing. Kind of evidence: oracle.

peft makes, saves, loads and merges everything here, in float64, on tiny models. What a merge should be is said once, of
each tensor T of the base model, from peft's own view of each adapter i: its change d_i of T, and whether it is LoRA or
held whole (a saved module, a trained bias).

    LoRA in those that change it    sum of w_i d_i; under renormalise over those that have it
    whole in those that change it   average: all have it, sum of w_i d_i. holders: over those. first: d_1. drop: 0
    LoRA in one, whole in another   no adapter says that without the base: refused, but where the whole ones are left out

A refusal names the module, and each way out that it names is tried.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from fedlora.adapters import AdapterFile, merge
from fedlora.errors import FedLoRAError
from support.peft_cases import randomise, seeded, without_card

pytestmark = pytest.mark.filterwarnings("ignore")  # of peft's, of much that these kinds are about

SIZES = {"vocab_size": 12, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "initializer_range": 0.3}


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(**SIZES, intermediate_size=10, max_position_embeddings=8, num_labels=3)
    )


def llama(tied: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    more = {"intermediate_size": 10, "num_key_value_heads": 1, "tie_word_embeddings": tied}
    return LlamaForCausalLM(LlamaConfig(**SIZES, **more, max_position_embeddings=8))


MODELS = {
    "bert": seeded(bert),
    "llama": seeded(lambda: llama(tied=False)),
    "tied": seeded(lambda: llama(tied=True)),
}
HEADS, MISSING = ("average", "holders", "first", "drop"), (None, "zero", "renormalise")
WHOLE_LAYER = "encoder.layer.0"
KINDS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "bert": {
        "LoRA": {"target_modules": ["query", "value"]},
        "LoRA elsewhere": {"target_modules": ["value", "intermediate.dense"]},
        "LoRA on pooler": {"target_modules": ["query", "pooler.dense"]},
        "LoRA on classifier": {"target_modules": ["value", "classifier"]},
        "LoRA on words": {"target_modules": ["query", "word_embeddings"]},
        "lora_bias": {"target_modules": ["query"], "lora_bias": True},
        "saved query": {"target_modules": ["value"], "modules_to_save": ["query"]},
        "saved pooler": {"target_modules": ["query"], "modules_to_save": ["pooler"]},
        "saved pooler.dense": {"target_modules": ["value"], "modules_to_save": ["pooler.dense"]},
        "saved layer": {"target_modules": ["pooler.dense"], "modules_to_save": [WHOLE_LAYER]},
        "saved attention": {"target_modules": ["pooler.dense"], "modules_to_save": [f"{WHOLE_LAYER}.attention"]},
        "saved words": {"target_modules": ["query"], "modules_to_save": ["word_embeddings"]},
        "bias all": {"target_modules": ["query"], "bias": "all"},
        "bias all elsewhere": {"target_modules": ["value"], "bias": "all"},
        "bias lora_only": {"target_modules": ["query", "value"], "bias": "lora_only"},
        "bias all, head": {"target_modules": ["value"], "bias": "all", "task_type": "SEQ_CLS"},
        "head": {"target_modules": ["query"], "task_type": "SEQ_CLS"},
    },
    "llama": {
        "LoRA": {"target_modules": ["q_proj", "v_proj"]},
        "LoRA on lm_head": {"target_modules": ["q_proj", "lm_head"]},
        "LoRA on embed_tokens": {"target_modules": ["v_proj", "embed_tokens"]},
        "LoRA on both": {"target_modules": ["embed_tokens", "lm_head"]},
        "saved lm_head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        "saved embed_tokens": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    },
    "tied": {
        "LoRA": {"target_modules": ["q_proj", "v_proj"]},
        "LoRA on embed_tokens": {"target_modules": ["q_proj", "embed_tokens"]},
        "LoRA tied": {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
        "saved embed_tokens": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        "saved tied": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        "saved lm_head": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
    },
}


# ---- the oracle ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class View:
    """What peft makes of an adapter. change: of each tensor. lora, whole: the tensors that it changes so."""

    change: Mapping[str, Tensor]
    lora: frozenset[str]
    whole: frozenset[str]


def view(model: str, folder: Path) -> View:
    base = {name: t.clone() for name, t in MODELS[model]().state_dict().items()}
    loaded = PeftModel.from_pretrained(MODELS[model](), folder).eval()
    config, lora, whole = loaded.peft_config["default"], set(), set()
    for path, module in loaded.base_model.model.named_modules():
        saved = getattr(module, "modules_to_save", None)
        if isinstance(saved, nn.ModuleDict):
            whole |= {f"{path}.{name}" for name in saved["default"].state_dict()}
        elif "default" in getattr(module, "lora_A", {}) or "default" in getattr(module, "lora_embedding_A", {}):
            lora |= {f"{path}.weight", *([f"{path}.bias"] if config.lora_bias else [])}
            whole |= {f"{path}.bias"} if config.bias == "lora_only" and f"{path}.bias" in base else set()
    whole |= {name for name in base if name.endswith(".bias")} if config.bias == "all" else set()
    for module in loaded.modules():  # tied weights are two tensors from here on: peft changes one use of them
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().clone(), requires_grad=False))
    dense = loaded.merge_and_unload().state_dict()
    assert dense.keys() == base.keys()
    change = {name: dense[name] - base[name] for name in base}
    odd = {name for name in base if bool(change[name].any())} - lora - whole
    assert not odd, odd
    return View(change, frozenset(lora), frozenset(whole))


def expected(views: list[View], weights: list[float], heads: str, missing: str | None) -> dict[str, Tensor] | str:
    """The change of each tensor, or the tensor for which there is none."""
    found = {}
    for name, zero in views[0].change.items():
        lora = [k for k, v in enumerate(views) if name in v.lora]
        whole = [k for k, v in enumerate(views) if name in v.whole]
        of = dict.fromkeys(range(len(views)), 0.0)
        kept = whole and heads != "drop" and not (heads == "first" and 0 not in whole)
        if kept and (lora or (heads == "average" and len(whole) < len(views))):
            return name
        if lora:
            module = f"{name.rpartition('.')[0]}.weight"  # an added bias counts as its module does
            held = [w for w, v in zip(weights, views, strict=True) if module in v.lora]
            total = math.fsum(held) if missing == "renormalise" else 1.0
            of |= {k: weights[k] / total for k in lora}
        elif kept:
            chosen = [0] if heads == "first" else whole
            of |= {k: weights[k] / math.fsum(weights[j] for j in chosen) for k in chosen}
        found[name] = sum((of[k] * v.change[name] for k, v in enumerate(views)), torch.zeros_like(zero))
    return found


# ---- adapters and merges ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, int], tuple[Path, View]]:
    """Each adapter once. The number tells two adapters of one kind apart."""
    root, kept = tmp_path_factory.mktemp("adapters"), {}

    def make(model: str, kind: str, number: int) -> tuple[Path, View]:
        key = (model, kind, number)
        if key not in kept:
            fields = {"r": 2 + number, "lora_alpha": 4} | KINDS[model][kind]
            found = get_peft_model(MODELS[model](), LoraConfig(**{k: list(v) if isinstance(v, list) else v
                                                                  for k, v in fields.items()}))  # fmt: skip
            randomise(found, len(kept) + 1)
            folder = root / f"{model}, {kind}, {number}"
            without_card(found).save_pretrained(folder)
            kept[key] = (folder, view(model, folder))
        return kept[key]

    return make


def fault(model: str, given: list[tuple[Path, View]], heads: str, missing: str | None, out: Path,
          weights: list[float], tolerance: float = 1e-9, tried: bool = False, **options: Any) -> str:  # fmt: skip
    """What is wrong with a merge; "" where nothing is."""
    want = expected([v for _, v in given], weights, heads, missing)
    try:
        merge([folder for folder, _ in given], out, weights=weights, heads=heads, missing=missing, **options)
    except FedLoRAError as error:
        return "" if not tried and not out.exists() else f"refused, or left something behind: {error}"
    return _compared(model, want, out, tolerance)


def _compared(model: str, want: Mapping[str, Tensor] | str, out: Path, tolerance: float) -> str:
    if isinstance(want, str):
        return f"accepted, and {want} cannot be said"
    try:
        got = view(model, out).change
        AdapterFile(out).check()
    except Exception as error:  # peft's own, of any type
        return f"not loaded: {type(error).__name__}: {error}"
    off = {name: float((got[name] - t).abs().max()) for name, t in want.items()}
    worst = max(off, key=lambda name: off[name])
    return f"{worst} is off by {off[worst]:.2g}" if off[worst] > tolerance else ""


def all_pairs() -> Iterator[tuple[str, str, str]]:
    for model, kinds in KINDS.items():
        yield from ((model, a, b) for a, b in itertools.product(kinds, repeat=2))


COMBINED = list(itertools.product(HEADS, MISSING))
