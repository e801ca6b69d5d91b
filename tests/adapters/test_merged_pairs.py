"""Pairs of ordinary kinds of adapters, merged under every choice of --heads and --missing. Kind of evidence: oracle.

peft makes, saves, loads and merges everything here, in float64, on tiny models. What a merge should be is said once, of
each tensor T of the base model, from peft's own view of each adapter i: its change d_i of T, and whether it is LoRA or
held whole (a saved module, a trained bias).

    LoRA in those that change it    sum of w_i d_i; under renormalise over those that have it
    whole in those that change it   average: all have it, sum of w_i d_i. first: d_1. drop: 0
    LoRA in one, whole in another   no adapter says it without the base: refused, but where the whole ones are left out

A refusal names the module, and each way out that it names is tried.
"""

from __future__ import annotations

import copy
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

from fedlora import Adapter, LoRA, write_adapter
from fedlora.adapters import AdapterFile, AdapterSpec, merge
from fedlora.adapters.module_names import saved_modules
from fedlora.errors import AdapterFormatError, FedLoRAError
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
HEADS, MISSING = ("average", "first", "drop"), (None, "zero", "renormalise")
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


def expected(views: list[View], weights: list[float], heads: str, missing: str | None) -> dict[str, Tensor] | set[str]:
    """The change of each tensor, or the tensors that no adapter can say it of."""
    found, unsayable = {}, set()
    for name, zero in views[0].change.items():
        lora = [k for k, v in enumerate(views) if name in v.lora]
        whole = [k for k, v in enumerate(views) if name in v.whole]
        of = dict.fromkeys(range(len(views)), 0.0)
        kept = whole and heads != "drop" and not (heads == "first" and 0 not in whole)
        if kept and (lora or (heads == "average" and len(whole) < len(views))):
            unsayable.add(name)
        elif lora:
            module = f"{name.rpartition('.')[0]}.weight"  # an added bias counts as its module does
            held = [w for w, v in zip(weights, views, strict=True) if module in v.lora]
            total = math.fsum(held) if missing == "renormalise" else 1.0
            of |= {k: weights[k] / total for k in lora}
        elif kept:
            chosen = [0] if heads == "first" else whole
            of |= {k: weights[k] / math.fsum(weights[j] for j in chosen) for k in chosen}
        found[name] = sum((of[k] * v.change[name] for k, v in enumerate(views)), torch.zeros_like(zero))
    return unsayable or found


# ---- adapters and merges ---------------------------------------------------------------------------------------------


Made = tuple[Path, View]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    """Each adapter once. The number tells two adapters of one kind apart."""
    root, kept = tmp_path_factory.mktemp("adapters"), {}

    def make(model: str, kind: str, number: int, dtype: torch.dtype = torch.float64) -> Made:
        key = (model, kind, number, dtype)
        if key not in kept:
            fields = copy.deepcopy({"r": 2 + number, "lora_alpha": 4} | KINDS[model][kind])  # peft appends in place
            found = get_peft_model(MODELS[model](), LoraConfig(**fields))
            randomise(found, len(kept) + 1)
            for parameter in found.parameters():
                parameter.data = parameter.data.to(dtype if parameter.requires_grad else parameter.dtype)
            folder = root / f"{len(kept)}"
            without_card(found).save_pretrained(folder)
            kept[key] = (folder, view(model, folder))
        return kept[key]

    return make


def fault(
    model: str, given: list[Made], weights: list[float], options: Mapping[str, Any], out: Path, tolerance: float = 1e-9
) -> str:
    """What is wrong with a merge; "" where nothing is. Of a refusal every way out is tried, and its ways out."""
    heads, missing = options.get("heads", "average"), options.get("missing")
    want = expected([v for _, v in given], weights, heads, missing)
    try:
        merge([folder for folder, _ in given], out, weights=weights, **options)
    except FedLoRAError as error:
        return _refused(str(error), want, model, given, weights, options, out)
    if isinstance(want, set):
        return f"accepted, and {want} cannot be said"
    try:
        got = view(model, out).change
        AdapterFile(out).check()
    except Exception as error:  # peft's own, of any type
        return f"not loaded: {type(error).__name__}: {error}"
    off = {name: float((got[name] - t).abs().max()) for name, t in want.items()}
    worst = max(off, key=lambda name: off[name])
    return f"{worst} is off by {off[worst]:.2g}" if off[worst] > tolerance else ""


def _refused(
    said: str, want: object, model: str, given: list[Made], weights: list[float], options: Mapping[str, Any], out: Path
) -> str:
    ways = re.findall(r"--(heads|missing) (\w+)", said)
    named = isinstance(want, set) and any(repr(n) in said for name in want for n in (name, name.rpartition(".")[0]))
    known = options.get("missing") is None and ("missing", "zero") in ways
    together = "takes no lora_bias" in said  # of an embedding: no adapter holds both, as peft says of it below
    if out.exists() or not (ways or together) or not (named or known or together):
        return f"refused, with something left behind, without a way out, or without need: {said}"
    for option, value in ways:
        if options.get(option) == value:
            return f"{value} is no way out of itself: {said}"
        wrong = fault(model, given, weights, {**options, option: value}, out.with_name(f"{out.name}-{value}"))
        if wrong:
            return f"the way out {value} of {said!r}: {wrong}"
    return ""


# ---- tests -----------------------------------------------------------------------------------------------------------

COMBINED = [{"heads": h} | ({"missing": m} if m else {}) for h, m in itertools.product(HEADS, MISSING)]
FIRST = [(model, kind) for model, kinds in KINDS.items() for kind in kinds]


def faults(
    made: Callable[..., Made], model: str, pairs: Iterator[tuple[str, str, Mapping[str, Any]]], out: Path
) -> str:
    found = []
    for number, (one, two, options) in enumerate(pairs):
        given = [made(model, one, 0), made(model, two, 1)]
        wrong = fault(model, given, [0.7, 0.3], options, out / str(number))
        found += [f"{one} + {two} {options}: {wrong}"] if wrong else []
    return "\n".join([f"{len(found)} wrong", *found]) if found else ""


@pytest.mark.parametrize(("model", "kind"), FIRST)
def test_a_merge_is_what_peft_makes_of_its_inputs(
    model: str, kind: str, made: Callable[..., Made], tmp_path: Path
) -> None:
    """Half of the pairs (of many kinds an eighth), each in one order and under one of the nine choices; every kind
    with itself."""
    kinds = list(KINDS[model])
    mine, every = kinds.index(kind), 8 if len(kinds) > 10 else 2
    pairs = (
        (*((kind, other) if (k + mine) % 2 else (other, kind)), COMBINED[(5 * k + mine) % 9])
        for k, other in enumerate(kinds)
        if k == mine or (k > mine and (k // 2 + mine) % every == 1)
    )
    assert not (said := faults(made, model, pairs, tmp_path)), said


@pytest.mark.exhaustive
@pytest.mark.parametrize(("model", "kind"), FIRST)
def test_every_merge(model: str, kind: str, made: Callable[..., Made], tmp_path: Path) -> None:
    """Every pair, in both orders, under all nine choices."""
    pairs = ((kind, other, options) for other in KINDS[model] for options in COMBINED)
    assert not (said := faults(made, model, pairs, tmp_path)), said


THREE = ("LoRA", "bias all", "head"), ("saved pooler", "saved pooler.dense", "LoRA"), ("bias lora_only", "head", "LoRA")


@pytest.mark.quick(3)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kinds", THREE, ids=repr)
def test_three_adapters_of_narrow_types(
    kinds: tuple[str, ...], dtype: torch.dtype, made: Callable[..., Made], tmp_path: Path
) -> None:
    """Written as float64, it is off by peft's own products in float32; in their own type it is rounded."""
    given = [made("bert", kind, k, dtype) for k, kind in enumerate(kinds)]
    options = {"heads": "first", "missing": "zero"}
    weights = [0.5, 0.125, 0.375]
    assert not fault("bert", given, weights, options | {"dtype": "float64"}, tmp_path / "wide", 1e-6)
    # B and A are rounded by eps / 2 relative, of numbers to about 1, with four products at most beside each other
    assert not fault("bert", given, weights, options, tmp_path / "own", 4 * torch.finfo(dtype).eps + 1e-6)


def test_lora_bias_and_an_embedding_do_not_go_together(made: Callable[..., Made], tmp_path: Path) -> None:
    """peft refuses that of one adapter, so no result holds both."""
    given = [made("bert", kind, k)[0] for k, kind in enumerate(("LoRA on words", "lora_bias"))]
    with pytest.raises(AdapterFormatError, match=r"word_embeddings.*takes no lora_bias.*no adapter holds both"):
        merge(given, tmp_path / "m")
    with pytest.raises(ValueError, match="lora_bias"):
        get_peft_model(MODELS["bert"](), LoraConfig(target_modules=["word_embeddings"], lora_bias=True))


# ---- single files ----------------------------------------------------------------------------------------------------


class Nested(nn.Module):
    """Modules in each other: a.b.c.d, of which each level may be saved."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.a = nn.Linear(3, 3), nn.Sequential()
        at: nn.Module = self.a
        for name in ("b", "c"):
            at.add_module(name, nn.Sequential())
            at = at.get_submodule(name)
        at.add_module("d", nn.Linear(3, 2))


def test_a_module_is_saved_by_its_whole_name() -> None:
    """peft compares whole paths of modules: `classifier2` is no `classifier`, and neither is its first half."""
    assert saved_modules("model.classifier2.weight", ["classifier"]) == []
    assert saved_modules("model.classifier.dense.weight", ["classifier", "dense"]) == [
        "model.classifier", "model.classifier.dense",
    ]  # fmt: skip


@pytest.mark.parametrize("saved", [["a"], ["a", "a.b"], ["b.c", "a.b"], ["d", "c"], ["a", "b.c"], ["a", "d"], ["d"]])
def test_saved_modules_within_each_other(saved: list[str], tmp_path: Path) -> None:
    """peft saves them and cannot load them, but for one two levels in: the reader says what peft does."""
    without_card(get_peft_model(Nested(), LoraConfig(target_modules=["q"], modules_to_save=saved))).save_pretrained(
        tmp_path
    )
    try:
        PeftModel.from_pretrained(Nested(), tmp_path)
    except KeyError:
        with pytest.raises(AdapterFormatError, match=r"saved module within|no tensor of it"):
            AdapterFile(tmp_path)
    else:
        AdapterFile(tmp_path)


def test_the_prefix_twice_is_refused(tmp_path: Path) -> None:
    """As saving a model leaves it that peft wrapped twice; peft loads none of it."""
    twice = get_peft_model(get_peft_model(Nested(), LoraConfig(target_modules=["q"])), LoraConfig(target_modules=["q"]))
    randomise(twice, 1)
    without_card(twice).save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(Nested(), tmp_path).state_dict()
    assert not any(t.any() for name, t in loaded.items() if "lora_B" in name)
    with pytest.raises(AdapterFormatError, match="the prefix twice"):
        AdapterFile(tmp_path)


def test_what_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    """alpha / r beyond what is read: a writer that is asked for it leaves nothing, and what was there stays."""
    pairs = Adapter({"q": LoRA(torch.ones(3, 2), torch.ones(2, 3))})
    config = {"peft_type": "LORA", "target_modules": ["q"]}
    write_adapter(tmp_path / "a", pairs, AdapterSpec(config, 2.0))
    before = (tmp_path / "a" / "adapter_config.json").read_bytes()
    for place in ("a", "b"):
        with pytest.raises(AdapterFormatError, match=r"nothing was written: .*alpha"):
            write_adapter(tmp_path / place, pairs, AdapterSpec(config, 20_000.0))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a" / "adapter_config.json").read_bytes() == before
