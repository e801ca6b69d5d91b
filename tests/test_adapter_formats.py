"""Every kind of adapter that peft writes, read, written and merged. Kinds of evidence: oracle and end-to-end.

peft makes two adapters of random numbers on a tiny model and saves them. Expected values come from peft and PyTorch
alone: the state dicts of `merge_and_unload` on a fresh base, in float64, and their mean with weights 0.7 and 0.3, key
by key. Nothing of fedlora computes one. What a merge writes is loaded by peft on a fresh base and compared in the same
way, and its logits, unmerged, with those of the dense model that has the oracle's weights.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
from peft import AdaLoraConfig, LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

import test_run
from fedlora import read_adapter, write_adapter
from fedlora.adapters.reader import CONFIG_FILE, WEIGHTS_FILE, AdapterFile
from fedlora.errors import AdapterFormatError
from test_run import Said
from tiny_models import TOKENS, VOCABULARY, bert, gpt2, llama

pytestmark = [
    pytest.mark.filterwarnings(rule)
    for rule in (
        # peft 0.21 asks transformers 5 for a property of its old name, whenever an adapter is added.
        r"ignore:.is_gradient_checkpointing. is deprecated:FutureWarning:transformers\.modeling_utils",
        # peft's save_pretrained takes every lora_B.bias for a damaged matrix.
        r"ignore:Adapter 'default'. \d+ LoRA tensor.s. have invalid shape:UserWarning:peft\.utils\.save_and_load",
        # ... says that it saves an embedding that is adapted, and cannot look up a base that has no name.
        r"ignore:Setting .save_embedding_layers. to .True.:UserWarning:peft\.utils\.save_and_load",
        # ... looks for the names of rank_pattern and alpha_pattern among modules only, and applies them to parameters
        # all the same; for AdaLoRA rank_pattern holds masks.
        r"ignore:The following (rank|alpha)_pattern keys did not match any targeted module:RuntimeWarning",
        # ... says that it merges into tied weights, which is what the tied cases are about.
        r"ignore:Input and output embeddings are no longer tied after merging:UserWarning:peft",
        r"ignore:Model with .tie_word_embeddings=True.:UserWarning:peft\.tuners\.tuners_utils",
    )
]

WEIGHTS = (0.7, 0.3)
main = test_run.main


# ---- models ----------------------------------------------------------------------------------------------------------


def seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Gives the same float64 model every time, as a copy."""

    @functools.cache
    def once() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return build().double().eval()

    return lambda: copy.deepcopy(once())


class ConvNet(nn.Module):
    """Convolutions in one, two and three dimensions, with kernels that are no cubes."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv1d(3, 6, 3)
        self.two = nn.Conv2d(3, 5, (3, 2), stride=2, padding=1)
        self.three = nn.Conv3d(2, 4, (2, 3, 1))
        self.fc = nn.Linear(6 + 5 + 4, 7)

    def forward(self, x: Tensor) -> Tensor:
        one = self.one(x[:, :, 0, :, 0]).mean(2)
        two = self.two(x[:, :, 0]).mean((2, 3))
        three = self.three(x[:, :2]).mean((2, 3, 4))
        return self.fc(torch.tanh(torch.cat([one, two, three], 1)))


class GroupedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.grouped = nn.Conv2d(4, 8, 3, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.grouped(x)


class TableNet(nn.Module):
    """An embedding with a name of its own, that peft does not save in full."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.words(x)))


class NormNet(nn.Module):
    """Its head holds buffers beside parameters, one of them a whole number."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 5)
        self.head = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.fc(x))


class AttentionNet(nn.Module):
    """PyTorch's own attention: peft adapts its joint projection and, inside, the one behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attention(x, x, x)[0])


class Experts(nn.Module):
    """Three experts in tensors of their own; `names` in the order in which they are registered."""

    def __init__(self, names: tuple[str, ...], transposed: bool) -> None:
        super().__init__()
        self.is_transposed = transposed  # as GPT-OSS has it: tensors (E, d_in, d_out), not (E, d_out, d_in)
        for name in names:
            d_in, d_out = (8, 10) if name.startswith("down") else (6, 8)
            shape = (3, d_in, d_out) if transposed else (3, d_out, d_in)
            self.register_parameter(name, nn.Parameter(0.3 * torch.randn(shape)))

    def forward(self, x: Tensor) -> Tensor:
        found = {name: w if self.is_transposed else w.mT for name, w in self.weights()}
        hidden = sum(torch.einsum("bi,eio->ebo", x, w) for name, w in found.items() if not name.startswith("down"))
        return torch.einsum("ebi,eio->bo", torch.tanh(hidden), found["down_proj"])

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name in ("gate_proj", "gate_up_proj", "up_proj", "down_proj"):
            if hasattr(self, name):
                yield name, getattr(self, name)


class Block(nn.Module):
    def __init__(self, names: tuple[str, ...], transposed: bool) -> None:
        super().__init__()
        self.router = nn.Linear(10, 6)
        self.experts = Experts(names, transposed)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(self.router(x))


class Mixture(nn.Module):
    def __init__(self, names: tuple[str, ...] = ("gate_up_proj", "down_proj"), transposed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(names, transposed) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def mixture(*names: str, transposed: bool = False) -> Callable[[], nn.Module]:
    return seeded(lambda: Mixture(names or ("gate_up_proj", "down_proj"), transposed))


def mixtral() -> nn.Module:
    """A transformers model whose experts are one tensor each of gate_up_proj and down_proj."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2, initializer_range=0.2,
        max_position_embeddings=16, experts_implementation="eager",
    )  # fmt: skip
    return MixtralForCausalLM(config)


def tied_llama() -> nn.Module:
    """A language model whose head is its table of embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.2, max_position_embeddings=16, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


# ---- cases -----------------------------------------------------------------------------------------------------------

_ROWS = torch.randn(4, 10, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
_IMAGES = torch.randn(2, 3, 5, 6, 4, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
LM: Mapping[str, Tensor] = {"input_ids": TOKENS}
CAUSAL = {"task_type": "CAUSAL_LM"}
QUERY = {"target_modules": ["query", "value"]}
SEQ = {"task_type": "SEQ_CLS", "target_modules": ["query", "value"]}


@dataclass(frozen=True)
class Case:
    """Two adapters of one base. one, two: fields of peft's config; `two` beside or instead of those of `one`.

    changed: parts of the names of the tensors that the adapters change; all others must stay the base's, bit for bit.
    """

    build: Callable[[], nn.Module]
    one: Mapping[str, Any]
    two: Mapping[str, Any]
    inputs: Mapping[str, Tensor] = field(default_factory=lambda: LM)
    configs: tuple[Callable[..., Any], Callable[..., Any]] = (LoraConfig, LoraConfig)
    changed: tuple[str, ...] = ()
    tolerance: float = 1e-10
    unshare: bool = False  # two adapted modules have one weight, to which peft would add both updates
    alter: Callable[[Any], None] | None = None


def lora(
    build: Callable[[], nn.Module], one: Mapping[str, Any], two: Mapping[str, Any] | None = None, **more: Any
) -> Case:
    """Ranks 4 and 3, scalings 2 and 5/3, unless said otherwise."""
    defaults = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    return Case(build, defaults | one, defaults | one | {"r": 3, "lora_alpha": 5} | (two or {}), **more)


def adalora(build: Callable[[], nn.Module], one: Mapping[str, Any], **more: Any) -> Case:
    defaults = {"init_r": 5, "target_r": 2, "lora_alpha": 8, "total_step": 10, "tinit": 1, "tfinal": 2}
    other = {"init_r": 3, "lora_alpha": 3}
    more = {
        "tolerance": 2e-6,
        "configs": (AdaLoraConfig, AdaLoraConfig),
    } | more  # fedlora holds these products in float32
    return Case(build, defaults | one, defaults | one | other, **more)


def half(case: Case, *dtypes: torch.dtype) -> Case:
    """The same, with the files' tensors rounded to narrow types and a float32 base."""

    def narrow(model: Any) -> None:
        config = model.peft_config["default"]
        dtype = dtypes[config.r % len(dtypes)]
        for name, parameter in model.named_parameters():
            if ".lora_" in name or ".modules_to_save." in name:
                parameter.data = parameter.data.to(dtype)

    return replace(case, build=lambda: case.build().float(), alter=narrow, tolerance=3e-6)


def pruned(model: Any) -> None:
    """As at the end of AdaLoRA's budget: each module keeps some of its ranks, by masks in rank_pattern."""
    pattern = {}
    for k, name in enumerate(n for n, _ in model.base_model.model.named_parameters() if ".lora_E." in n):
        r = model.peft_config["default"].init_r
        pattern[name] = [(j + k) % 3 != 0 for j in range(r)]
    model.base_model.resize_modules_by_rank_pattern(pattern, "default")
    model.peft_config["default"].rank_pattern = pattern


def emptied(model: Any) -> None:
    """The same, with one module of rank 0."""
    names = [n for n, _ in model.base_model.model.named_parameters() if ".lora_E." in n]
    pattern = {name: [k != 1] * model.peft_config["default"].init_r for k, name in enumerate(names)}
    model.base_model.resize_modules_by_rank_pattern(pattern, "default")
    model.peft_config["default"].rank_pattern = pattern


LLAMA, GPT2, BERT, TIED = (seeded(build) for build in (llama, gpt2, bert, tied_llama))
CONV, TABLE, NORM, MIXTRAL = (seeded(build) for build in (ConvNet, TableNet, NormNet, mixtral))
ATTENTION, GROUPED = seeded(AttentionNet), seeded(GroupedNet)
QV = ("q_proj", "v_proj")
EXPERTS = {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
BOTH = ("gate_up_proj", "down_proj")
MOE: dict[str, Any] = {"inputs": {"x": _ROWS}, "changed": BOTH}

CASES = {
    "linear": lora(LLAMA, CAUSAL, changed=QV),
    "linear, no task type": lora(LLAMA, {}, changed=QV),
    "list, regex": lora(LLAMA, CAUSAL, {"target_modules": r".*\.1\.self_attn\.(k|v)_proj"},
                        changed=(*QV, "1.self_attn.k_proj")),
    "regex, list": lora(LLAMA, CAUSAL | {"target_modules": r".*\.(q|k)_proj"}, {"target_modules": ["v_proj"]},
                        changed=(*QV, "k_proj")),
    "all-linear": lora(LLAMA, CAUSAL | {"target_modules": "all-linear"}, changed=("_proj",)),
    "some layers": lora(LLAMA, CAUSAL | {"layers_to_transform": [1]}, {"layers_to_transform": 0}, changed=QV),
    "layers by pattern": lora(LLAMA, CAUSAL | {"layers_to_transform": [1], "layers_pattern": "layers"}, changed=QV),
    "excluded": lora(LLAMA, CAUSAL | {"exclude_modules": ["model.layers.0.self_attn.v_proj"]},
                     {"exclude_modules": r".*1.*q_proj"}, changed=QV),
    "rank and alpha patterns": lora(
        LLAMA, CAUSAL | {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {r"layers\.1\..*": 3, "v_proj": 7}},
        {"rank_pattern": {r"^model\.layers\.1.*": 6}, "alpha_pattern": {}}, changed=QV),
    "rsLoRA": lora(LLAMA, CAUSAL | {"use_rslora": True}, changed=QV),
    "rsLoRA with patterns": lora(LLAMA, CAUSAL | {"use_rslora": True, "rank_pattern": {"q_proj": 6}},
                                 {"use_rslora": False}, changed=QV),
    "float32": half(lora(LLAMA, CAUSAL, changed=QV), torch.float32),
    "bfloat16": half(lora(LLAMA, CAUSAL | {"alpha_pattern": {"v_proj": 7}}, changed=QV), torch.bfloat16),
    "float16": half(lora(BERT, SEQ, changed=("query", "value", "classifier")), torch.float16),
    "float16 and bfloat16": half(lora(LLAMA, CAUSAL | {"use_rslora": True}, changed=QV), torch.float16, torch.bfloat16),
    "float64 and float16": half(lora(LLAMA, CAUSAL, changed=QV), torch.float64, torch.float16),
    "Conv1D": lora(GPT2, CAUSAL | {"target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True},
                   changed=("c_attn", "c_fc", "c_proj")),
    "Conv1D and embedding": lora(GPT2, {"target_modules": ["c_attn", "wpe"], "fan_in_fan_out": True},
                                 changed=("c_attn", "wpe")),
    "convolutions": lora(CONV, {"target_modules": ["one", "two", "three", "fc"]}, {"target_modules": ["two", "three"]},
                         inputs={"x": _IMAGES}, changed=("one", "two", "three", "fc")),
    "convolutions, patterns": lora(CONV, {"target_modules": ["one", "two"], "rank_pattern": {"two": 2}},
                                   {"alpha_pattern": {"one": 1}}, inputs={"x": _IMAGES}, changed=("one", "two")),
    "embedding": lora(LLAMA, CAUSAL | {"target_modules": ["embed_tokens", "q_proj"]},
                      changed=("embed_tokens", "q_proj")),
    "embedding of another name": lora(TABLE, {"target_modules": ["words", "out"]}, inputs={"x": TOKENS % 11},
                                      changed=("words", "out")),
    "lm_head": lora(LLAMA, CAUSAL | {"target_modules": ["lm_head", "v_proj"]}, changed=("lm_head", "v_proj")),
    "embedding and lm_head": lora(LLAMA, CAUSAL | {"target_modules": r".*(embed_tokens|lm_head|q_proj)"},
                                  changed=("embed_tokens", "lm_head", "q_proj")),
    "lora_bias": lora(BERT, QUERY | {"lora_bias": True}, changed=("query", "value")),
    "lora_bias, rsLoRA, patterns": lora(
        BERT, QUERY | {"lora_bias": True, "use_rslora": True, "rank_pattern": {"query": 2}},
        changed=("query", "value")),
    "lora_bias of one only": lora(BERT, QUERY | {"lora_bias": True}, {"lora_bias": False},
                                  changed=("query", "value")),
    "lora_bias of the other only": lora(BERT, QUERY, {"lora_bias": True},
                                        changed=("query", "value")),
    "bias all": lora(BERT, SEQ | {"bias": "all"}, changed=("query", "value", "bias", "classifier")),
    "bias lora_only": lora(BERT, SEQ | {"bias": "lora_only"}, changed=("query", "value", "classifier")),
    "bias all without a head": lora(BERT, {"target_modules": ["query"], "bias": "all"}, changed=("query", "bias")),
    "both kinds of bias": lora(BERT, {"target_modules": ["query"], "bias": "lora_only", "lora_bias": True},
                               changed=("query",)),
    "heads": lora(BERT, SEQ | {"modules_to_save": ["pooler"]}, changed=("query", "value", "pooler", "classifier")),
    "lm_head in full": lora(LLAMA, CAUSAL | {"modules_to_save": ["lm_head"]}, changed=(*QV, "lm_head")),
    "embeddings in full": lora(LLAMA, CAUSAL | {"modules_to_save": ["embed_tokens", "lm_head"]},
                               changed=(*QV, "lm_head", "embed_tokens")),
    "a head with buffers": lora(NORM, {"target_modules": ["fc"], "modules_to_save": ["head"]},
                                inputs={"x": _ROWS[:, :6]}, changed=("fc", "head")),
    "trained tokens": lora(LLAMA, CAUSAL | {"trainable_token_indices": [1, 7, 3]}, changed=(*QV, "embed_tokens")),
    "trained tokens by name": lora(LLAMA, CAUSAL | {"trainable_token_indices": {"embed_tokens": [2, 0]}},
                                   changed=(*QV, "embed_tokens")),
    "trained tokens of two tables": lora(
        LLAMA, CAUSAL | {"trainable_token_indices": {"embed_tokens": [2, 0], "lm_head": [4]}},
        changed=(*QV, "embed_tokens", "lm_head")),
    "tied, linear": lora(TIED, CAUSAL, changed=QV),
    "tied, trained tokens": lora(TIED, CAUSAL | {"trainable_token_indices": [1, 2]},
                                 changed=(*QV, "embed_tokens", "lm_head")),
    "tied, saved in full": lora(TIED, CAUSAL | {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
                                changed=(*QV, "embed_tokens", "lm_head")),
    "tied, adapted": lora(TIED, CAUSAL | {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
                          changed=("q_proj", "embed_tokens", "lm_head"), unshare=True),
    "experts, one parameter": lora(mixture(), EXPERTS | {"target_parameters": ["experts.gate_up_proj"]},
                                   **MOE | {"changed": ("gate_up_proj",)}),
    "experts, transposed, one": lora(mixture(transposed=True), EXPERTS | {"target_parameters": ["experts.down_proj"]},
                                     **MOE | {"changed": ("down_proj",)}),
    "experts, two nested": lora(mixture(), EXPERTS, **MOE),
    "experts, two, other order": lora(mixture("down_proj", "gate_up_proj"), EXPERTS, **MOE),
    "experts, transposed, two": lora(mixture(transposed=True), EXPERTS, **MOE),
    "experts, three": lora(
        mixture("down_proj", "gate_proj", "up_proj"),
        EXPERTS | {"target_parameters": ["experts.gate_proj", "experts.up_proj", "experts.down_proj"]},
        **MOE | {"changed": ("gate_proj", "up_proj", "down_proj")}),
    "experts, rsLoRA": lora(mixture(), EXPERTS | {"use_rslora": True}, **MOE),
    "experts, alike patterns": lora(
        mixture(), EXPERTS | {"rank_pattern": {".*_proj": 2}, "alpha_pattern": {r"layers\.1\..*": 3}}, **MOE),
    "experts, rank_pattern on the alphabetically first": lora(
        mixture("down_proj", "gate_up_proj"), EXPERTS | {"rank_pattern": {"down_proj": 2}}, **MOE),
    "experts, rank_pattern on the second": lora(
        mixture("down_proj", "gate_up_proj"), EXPERTS | {"rank_pattern": {"experts.gate_up_proj": 2}}, **MOE),
    "experts, rank_pattern, registered out of order": lora(
        mixture(), EXPERTS | {"rank_pattern": {"down_proj": 2}}, **MOE),
    "experts and layers": lora(
        mixture(), EXPERTS | {"target_modules": ["router"]}, {"rank_pattern": {"router": 2}},
        **MOE | {"changed": (*BOTH, "router")}),
    "Mixtral": lora(MIXTRAL, CAUSAL | EXPERTS | {"target_modules": ["q_proj"]}, changed=(*BOTH, "q_proj")),
    "a matrix as parameter": lora(LLAMA, CAUSAL | {"target_modules": [], "target_parameters": ["q_proj.weight"]},
                                  changed=("q_proj",)),
    "attention": lora(ATTENTION, {"target_modules": ["attention"]}, inputs={"x": _IMAGES.reshape(6, 15, 8)},
                      changed=("in_proj_weight", "out_proj.weight")),
    "layers repeated": lora(LLAMA, CAUSAL | {"layer_replication": [[0, 2], [0, 2]]}, changed=QV, unshare=True),
    "AdaLoRA": adalora(LLAMA, CAUSAL | {"target_modules": ["q_proj", "v_proj"]}, changed=QV),
    "AdaLoRA, heads": adalora(BERT, SEQ, changed=("query", "value", "classifier")),
    "AdaLoRA, Conv1D": adalora(GPT2, CAUSAL | {"target_modules": ["c_attn"], "fan_in_fan_out": True},
                               changed=("c_attn",)),
    "AdaLoRA, pruned": adalora(LLAMA, CAUSAL | {"target_modules": ["q_proj", "v_proj"]}, alter=pruned, changed=QV),
    "AdaLoRA, bias all": adalora(BERT, {"target_modules": ["query"], "bias": "all"}, changed=("query", "bias")),
    "AdaLoRA, convolution": adalora(CONV, {"target_modules": ["two", "fc"]}, inputs={"x": _IMAGES},
                                    changed=("two", "fc")),
    "AdaLoRA, a module pruned away": adalora(LLAMA, CAUSAL | {"target_modules": ["q_proj", "v_proj"]}, alter=emptied,
                                            changed=QV),
    "AdaLoRA and LoRA": Case(
        LLAMA, CAUSAL | {"target_modules": ["q_proj", "v_proj"], "init_r": 5, "total_step": 10, "lora_alpha": 8},
        CAUSAL | {"target_modules": ["v_proj"], "r": 3, "lora_alpha": 8, "use_rslora": True}, changed=QV,
        tolerance=2e-6, configs=(AdaLoraConfig, LoraConfig)),
    "LoRA and AdaLoRA": Case(
        LLAMA, CAUSAL | {"target_modules": ["v_proj"], "r": 3, "lora_alpha": 8, "use_rslora": True},
        CAUSAL | {"target_modules": ["q_proj", "v_proj"], "init_r": 5, "total_step": 10, "lora_alpha": 8}, changed=QV,
        tolerance=2e-6, configs=(LoraConfig, AdaLoraConfig)),
}  # fmt: skip


# ---- the oracle ------------------------------------------------------------------------------------------------------


def randomise(model: nn.Module, seed: int) -> None:
    """Random numbers in everything that trains: no factor is zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def saved(case: Case, which: int, folder: Path) -> Path:
    fields = copy.deepcopy(dict((case.one, case.two)[which]))  # peft appends in place
    model = get_peft_model(case.build(), case.configs[which](**fields)).eval()
    randomise(model, which + 1)
    if case.alter is not None:
        case.alter(model)
    model.save_pretrained(folder)
    return folder


def loaded(case: Case, folder: Path) -> Any:
    return PeftModel.from_pretrained(case.build(), folder).eval()


def dense(case: Case, folder: Path) -> nn.Module:
    """The base with the adapter merged into it by peft."""
    model = loaded(case, folder)
    if case.unshare:
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(parameter.detach().clone(), requires_grad=False))
    merged: nn.Module = model.merge_and_unload()
    return merged.eval()


def base_state(case: Case) -> dict[str, Tensor]:
    state = case.build().state_dict()
    if "layer_replication" in case.one:  # two layers twice
        again = {k.replace(f"layers.{j}.", f"layers.{j + 2}."): t for k, t in state.items() for j in (0, 1)
                 if f"layers.{j}." in k}  # fmt: skip
        state |= again
    return {key: tensor.clone() for key, tensor in state.items()}


@torch.no_grad()
def said(case: Case, model: nn.Module) -> Tensor:
    out = model(**case.inputs)
    found: Tensor = getattr(out, "logits", out)
    return found


@dataclass(frozen=True)
class Made:
    """Two adapters that peft saved, what peft's dense models of them hold and say, and the mean of what they hold."""

    case: Case
    folders: tuple[Path, Path]
    states: tuple[dict[str, Tensor], dict[str, Tensor]]
    said: tuple[Tensor, Tensor]
    mean: dict[str, Tensor]
    base: dict[str, Tensor]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    @functools.cache
    def make(name: str) -> Made:
        case, root = CASES[name], tmp_path_factory.mktemp("made")
        folders = (saved(case, 0, root / "a"), saved(case, 1, root / "b"))
        models = [dense(case, folder) for folder in folders]
        logits = (said(case, models[0]), said(case, models[1]))
        states = tuple({k: t.clone() for k, t in model.state_dict().items()} for model in models)
        assert states[0].keys() == states[1].keys()
        mean = {k: sum(w * s[k] for w, s in zip(WEIGHTS, states, strict=True)) for k in states[0]}
        mean = {k: t.to(states[0][k].dtype) for k, t in mean.items()}  # type: ignore[union-attr]
        return Made(case, folders, states, logits, mean, base_state(case))  # type: ignore[arg-type]

    return make


def assert_states(got: Mapping[str, Tensor], want: Mapping[str, Tensor], x: Made, inputs: tuple[int, ...]) -> None:
    """Key by key; what none of the inputs changes is the base's bit for bit."""
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        torch.testing.assert_close(got[key], tensor, rtol=0, atol=x.case.tolerance, msg=lambda m, k=key: f"{k}: {m}")
        if all(torch.equal(x.states[k][key], x.base[key]) for k in inputs):
            assert torch.equal(got[key], x.base[key]), key


# ---- known defects ---------------------------------------------------------------------------------------------------

READ, MERGED = "read and written", "merged"
DEFECTS: dict[tuple[str, str], str] = {}
for _what in (READ, MERGED):
    DEFECTS |= {
        (
            _what,
            "AdaLoRA, convolution",
        ): "AdaLoRA stores a convolution's A flat; written as LoRA's, peft cannot load it",
    }


def cases(what: str) -> list[Any]:
    """All names; those that fail for a known reason are marked."""
    known = {name: pytest.mark.xfail(strict=True, reason=DEFECTS[what, name]) for w, name in DEFECTS if w == what}
    return [pytest.param(name, marks=[known[name]] if name in known else []) for name in CASES]


# ---- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_the_inputs_are_what_the_test_says(name: str, made: Callable[[str], Made]) -> None:
    """The two adapters differ and change what they should, by a lot; peft's dense models say what its adapters say."""
    x = made(name)
    for state, folder, whole in zip(x.states, x.folders, x.said, strict=True):
        changed = {k for k, t in state.items() if not torch.equal(t, x.base[k])}
        assert changed and all(any(part in key for part in x.case.changed) for key in changed)
        assert max(float((state[k] - x.base[k]).abs().max()) for k in changed) > 0.1
        torch.testing.assert_close(
            said(x.case, loaded(x.case, folder)), whole, rtol=0, atol=1e-4 if x.case.tolerance > 1e-6 else 1e-9
        )
    both = {k for s in x.states for k, t in s.items() if not torch.equal(t, x.base[k])}
    assert all(any(part in key for key in both) for part in x.case.changed)
    assert any(not torch.equal(x.states[0][k], x.states[1][k]) for k in both)


@pytest.mark.parametrize("name", cases(READ))
def test_what_is_read_is_written_with_the_same_meaning(name: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    """peft loads the copy on a fresh base: its weights and logits are those of the original."""
    x = made(name)
    for k, (folder, state) in enumerate(zip(x.folders, x.states, strict=True)):
        adapter, spec = read_adapter(folder)
        write_adapter(tmp_path / folder.name, adapter, spec)
        got = said(x.case, loaded(x.case, tmp_path / folder.name))
        torch.testing.assert_close(got, x.said[k], rtol=0, atol=max(x.case.tolerance * 100, 1e-9))
        assert_states(dense(x.case, tmp_path / folder.name).state_dict(), state, x, (k,))


@pytest.mark.parametrize("name", cases(MERGED))
def test_a_merge_is_the_mean_of_the_dense_models(
    name: str, made: Callable[[str], Made], main: Callable[..., Said], tmp_path: Path
) -> None:
    """`fedlora merge` of both: every tensor of peft's dense model of the result is the weighted mean of both ones'."""
    x = made(name)
    done = main("merge", *x.folders, "--weights", ",".join(map(str, WEIGHTS)), "-o", tmp_path / "m")
    assert done.code == 0, done.err
    assert_states(dense(x.case, tmp_path / "m").state_dict(), x.mean, x, (0, 1))
    want = dense(x.case, x.folders[0])
    want.load_state_dict(x.mean)
    got = said(x.case, loaded(x.case, tmp_path / "m"))
    torch.testing.assert_close(got, said(x.case, want), rtol=0, atol=max(x.case.tolerance * 100, 1e-9))
    assert float((got - said(x.case, x.case.build())).abs().max()) > 0.05
    assert main("validate", tmp_path / "m").code == 0


# name -> (the field that the refusal names, fields of peft's config)
REFUSED = {
    "DoRA": ("use_dora", {"use_dora": True}),
    "PiSSA": ("init_lora_weights", {"init_lora_weights": "pissa"}),
    "PiSSA, fast": ("init_lora_weights", {"init_lora_weights": "pissa_niter_4"}),
    "OLoRA": ("init_lora_weights", {"init_lora_weights": "olora"}),
    "aLoRA": ("alora_invocation_tokens", {"alora_invocation_tokens": [1, 2], "task_type": "CAUSAL_LM"}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_plain_update_is_refused_by_its_field(
    name: str, made: Callable[[str], Made], main: Callable[..., Said], tmp_path: Path
) -> None:
    """In a merge too, beside a sound adapter; nothing is written."""
    named, fields = REFUSED[name]
    bad = saved(lora(llama, CAUSAL | fields), 0, tmp_path / "bad")  # not in float64: PiSSA cannot
    with pytest.raises(AdapterFormatError, match=rf"\b{named} = "):
        read_adapter(bad)
    done = main("merge", made("linear").folders[0], bad, "-o", tmp_path / "m")
    assert done.code == 2 and f"{named} = " in done.err and done.err.count("\n") == 1
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (peft.LoHaConfig, {"target_modules": ["q_proj"]}),
        (peft.LoKrConfig, {"target_modules": ["q_proj"]}),
        (peft.IA3Config, {"target_modules": ["q_proj"], "feedforward_modules": []}),
        (peft.PromptTuningConfig, {"num_virtual_tokens": 2}),
    ],
)
def test_other_kinds_of_adapters_are_refused(
    config: Callable[..., Any], fields: dict[str, Any], main: Callable[..., Said], tmp_path: Path
) -> None:
    bad = saved(Case(LLAMA, CAUSAL | fields, {}, configs=(config, config)), 0, tmp_path / "bad")
    with pytest.raises(AdapterFormatError, match=r"\bpeft_type = "):
        AdapterFile(bad)
    done = main("validate", bad)
    assert done.code == 2 and "peft_type = " in done.err and done.err.count("\n") == 1


@pytest.mark.parametrize("order", [BOTH, BOTH[::-1]], ids=str)
def test_nested_parameters_of_different_scalings_are_refused(
    order: tuple[str, ...], main: Callable[..., Said], tmp_path: Path
) -> None:
    """peft nests them in the order in which the module registered them, which no file tells: a guess may swap them."""
    fields = EXPERTS | {"alpha_pattern": {"down_proj": 2}}
    bad = saved(lora(mixture(*order), fields), 0, tmp_path / "bad")
    with pytest.raises(AdapterFormatError, match=r"layers\.0\.experts.*alpha_pattern"):
        read_adapter(bad)
    done = main("merge", bad, bad, "-o", tmp_path / "m")
    assert done.code == 2 and done.err.count("\n") == 1 and not (tmp_path / "m").exists()


@pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd layer with groups > 1:UserWarning:peft")
def test_a_grouped_convolution_is_refused(main: Callable[..., Said], tmp_path: Path) -> None:
    """Its B has r / groups columns: no product of two matrices."""
    bad = saved(lora(GROUPED, {"target_modules": ["grouped"]}), 0, tmp_path / "bad")
    with pytest.raises(AdapterFormatError, match=r"module 'grouped'.*grouped convolutions are not supported"):
        AdapterFile(bad)


# what -> (adapters by case and number, what the refusal names)
UNALIKE = {
    "other tokens": (("trained tokens", 0), ("trained tokens by name", 0), "trainable_token_indices"),
    "no tokens": (("trained tokens", 0), ("linear", 0), "trainable_token_indices"),
    "repeated layers": (("layers repeated", 0), ("linear", 0), "layer_replication"),
    "other parameters": (("experts, one parameter", 0), ("experts, two nested", 0), "target_parameters"),
    "a head of one only": (("lm_head in full", 0), ("linear", 0), "lm_head.weight"),
    "biases of one only": (("bias all without a head", 0), ("lora_bias of one only", 0), "bias"),
    "biases of the other only": (("lora_bias of one only", 0), ("bias all without a head", 0), "bias"),
}


@pytest.mark.parametrize("what", UNALIKE)
def test_adapters_whose_other_tensors_do_not_add_up(
    what: str, made: Callable[[str], Made], main: Callable[..., Said], tmp_path: Path
) -> None:
    (one, i), (two, j), named = UNALIKE[what]
    done = main("merge", made(one).folders[i], made(two).folders[j], "-o", tmp_path / "m")
    assert done.code == 2 and named in done.err and done.err.count("\n") == 1
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("name", ["linear", "convolutions", "embedding", "lora_bias", "Mixtral", "AdaLoRA"])
def test_a_file_says_what_it_holds(name: str, made: Callable[[str], Made]) -> None:
    """Ranks and shapes of each module, before a tensor is read; their products are peft's updates, one by one."""
    x = made(name)
    file = AdapterFile(x.folders[0])
    assert set(file.ranks) == set(file.modules)
    for module in file.modules:
        path, _, expert = module.partition("[")
        weight = f"{path}.weight"
        if expert:  # nested: the one registered first is inside
            weight = path.removesuffix(".base_layer") + (".gate_up_proj" if "base_layer" in path else ".down_proj")
        change = x.states[0][weight] - x.base[weight]
        change = change[int(expert[:-1])] if expert else change
        delta = file.lora(module).delta().double()
        want = change.T if "embed" in path else change.flatten(1)
        torch.testing.assert_close(delta, want, rtol=0, atol=max(x.case.tolerance, 1e-9))
        assert file.lora(module).rank == file.ranks[module]


def test_a_merge_is_the_same_in_any_order_of_the_fields(
    made: Callable[[str], Made], main: Callable[..., Said], tmp_path: Path
) -> None:
    """Two runs, and a run of copies whose configs list their fields backwards, give the same bytes."""
    x = made("rank and alpha patterns")
    turned = []
    for folder in x.folders:
        config = json.loads((folder / CONFIG_FILE).read_text())
        (tmp_path / folder.name).mkdir()
        (tmp_path / folder.name / CONFIG_FILE).write_text(json.dumps(dict(reversed(config.items()))))
        tensors = safetensors.torch.load_file(folder / WEIGHTS_FILE)
        safetensors.torch.save_file(dict(reversed(tensors.items())), tmp_path / folder.name / WEIGHTS_FILE)
        turned.append(tmp_path / folder.name)
    for out, folders in zip("pqr", itertools.chain([x.folders, x.folders, turned]), strict=True):
        assert main("merge", *folders, "-o", tmp_path / out).code == 0
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        assert len({(tmp_path / out / name).read_bytes() for out in "pqr"}) == 1, name
