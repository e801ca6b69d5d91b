"""Two adapters of every kind that peft writes, and peft's own dense models of them: cases and oracle."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from peft import AdaLoraConfig, LoraConfig, PeftModel, get_peft_model
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
    more = {"configs": (AdaLoraConfig, AdaLoraConfig)} | more
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
    "rsLoRA with patterns": lora(
        LLAMA, CAUSAL | {"use_rslora": True, "rank_pattern": {"q_proj": 6}, "alpha_pattern": {r"layers\.1\..*": 7}},
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
    "Mixtral, all-linear": lora(MIXTRAL, CAUSAL | {"target_modules": "all-linear"},
                                changed=(*BOTH, "q_proj", "k_proj", "v_proj", "o_proj", "gate")),
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
        configs=(AdaLoraConfig, LoraConfig)),
    "LoRA and AdaLoRA": Case(
        LLAMA, CAUSAL | {"target_modules": ["v_proj"], "r": 3, "lora_alpha": 8, "use_rslora": True},
        CAUSAL | {"target_modules": ["q_proj", "v_proj"], "init_r": 5, "total_step": 10, "lora_alpha": 8}, changed=QV,
        configs=(LoraConfig, AdaLoraConfig)),
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
    model = get_peft_model(case.build(), case.configs[which](**fields)).eval()
    randomise(model, which + 1)
    if case.alter is not None:
        case.alter(model)
    without_card(model).save_pretrained(folder)
    return folder


def without_card(model: Any) -> Any:
    """A model that saves no README.md, which takes peft longer than the rest."""
    model.create_or_update_model_card = lambda folder: None
    return model


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
