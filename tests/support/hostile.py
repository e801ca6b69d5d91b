"""Adapters that are nearly right, by grammar: configs, headers, numbers, folders, and several adapters together.

A `Draft` is an adapter before it is bytes. The `MUTATIONS` change it as a careless or a malicious uploader would; what
is drawn is written by `Draft.write` as it is, without any library that could soften it. What must come of it is the
business of `support.hostile_judge`.
"""

from __future__ import annotations

import json
import math
import os
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

PREFIX = "base_model.model."
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_NUMPY: dict[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64, "I32": np.int32, "U8": np.uint8,
    "BOOL": np.bool_,
}  # fmt: skip
Draw = st.DrawFn


# ---- what a file is made of ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Raw:
    """These very letters in a JSON file."""

    text: str


def encoded(value: Any) -> str:
    """JSON, with `Raw` letters and numbers that JSON does not know."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(str(k))}: {encoded(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(encoded(v) for v in value) + "]"
    return json.dumps(value)


@dataclass
class Block:
    """One tensor: what the header says, and its numbers. dtype BF16 is cut from float32."""

    shape: tuple[int, ...]
    dtype: str = "F32"
    numbers: Any = None  # an array, or None: drawn by the seed
    says: dict[str, Any] = field(default_factory=dict)  # over what is true

    def content(self, seed: int) -> bytes:
        numbers = self.numbers
        if numbers is None:
            numbers = np.random.default_rng(seed).standard_normal(self.shape)
        with np.errstate(all="ignore"):
            if self.dtype == "BF16":
                return (np.asarray(numbers).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
            return np.asarray(numbers).astype(_NUMPY[self.dtype]).tobytes()


@dataclass
class Draft:
    """An adapter before it is bytes. more: what else is done to its folder, in order."""

    config: dict[str, Any]
    tensors: dict[str, Block]
    seed: int = 0
    metadata: Any = None
    extra_config: str = ""  # letters before the last brace
    extra_header: str = ""
    damage: Callable[[bytes], bytes] | None = None
    more: list[Callable[[Path], None]] = field(default_factory=list)
    name: str = "a"
    changes: list[str] = field(default_factory=list)  # in words

    def header(self) -> tuple[str, bytes]:
        entries: dict[str, Any] = {} if self.metadata is None else {"__metadata__": self.metadata}
        data = b""
        for k, (key, block) in enumerate(self.tensors.items()):
            content = block.content(self.seed * 1000 + k)
            true = {
                "dtype": block.dtype,
                "shape": list(block.shape),
                "data_offsets": [len(data), len(data) + len(content)],
            }
            entries[key] = {**true, **block.says}
            data += content
        return encoded(entries), data

    def write(self, home: Path) -> Path:
        folder = home / self.name
        folder.mkdir(parents=True)
        text = encoded(self.config)
        if self.extra_config:
            text = f"{text[:-1]}, {self.extra_config}}}"
        (folder / CONFIG_FILE).write_text(text, encoding="utf-8", errors="surrogatepass")
        head, data = self.header()
        if self.extra_header:
            head = f"{head[:-1]}, {self.extra_header}}}"
        raw = head.encode("utf-8", "surrogatepass")
        content = struct.pack("<Q", len(raw)) + raw + data
        (folder / WEIGHTS_FILE).write_bytes(self.damage(content) if self.damage else content)
        for change in self.more:
            change(folder)
        return folder


# ---- sound adapters --------------------------------------------------------------------------------------------------

Layers = Mapping[str, tuple[Any, ...]]  # path -> (kind, sizes ...): see `support.hostile_judge.build`


@dataclass(frozen=True)
class Kind:
    """A base of a few layers, and a sound adapter of it."""

    layers: Layers
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    model: Mapping[str, Any] = field(default_factory=dict)  # its config.json


CONFIG: dict[str, Any] = {
    "peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "rank_pattern": {},
    "alpha_pattern": {}, "use_rslora": False, "init_lora_weights": True, "bias": "none", "modules_to_save": None,
    "task_type": None, "base_model_name_or_path": "some/base", "revision": None, "inference_mode": True,
    "lora_dropout": 0.1, "fan_in_fan_out": False, "layers_to_transform": None, "layers_pattern": None,
    "exclude_modules": None, "use_dora": False, "lora_bias": False, "target_parameters": None,
    "trainable_token_indices": None, "peft_version": "0.21.2",
}  # fmt: skip


def pair(path: str, d_out: int, d_in: int, r: int = 2) -> dict[str, tuple[int, ...]]:
    return {f"{PREFIX}{path}.lora_A.weight": (r, d_in), f"{PREFIX}{path}.lora_B.weight": (d_out, r)}


Q0, V0, Q1 = "model.layers.0.q_proj", "model.layers.0.v_proj", "model.layers.1.q_proj"
_LINEAR = {
    Q0: ("linear", 6, 5), V0: ("linear", 4, 5), Q1: ("linear", 5, 5), "model.layers.1.k_proj": ("linear", 6, 5),
    "score": ("linear", 3, 4),
}  # fmt: skip
_PLAIN = {**pair(Q0, 6, 5), **pair(V0, 4, 5), **pair(Q1, 5, 5)}
LLAMA = {"model_type": "llama", "num_hidden_layers": 3}  # by itself transformers builds 32, four times a case
KINDS: dict[str, Kind] = {
    "linear": Kind(_LINEAR, CONFIG, _PLAIN, LLAMA),
    "heads": Kind(
        _LINEAR, CONFIG | {"modules_to_save": ["score"]},
        {**_PLAIN, f"{PREFIX}score.weight": (3, 4), f"{PREFIX}score.bias": (3,)}, LLAMA),
    "added bias": Kind(
        _LINEAR, CONFIG | {"lora_bias": True, "bias": "lora_only"},
        {**_PLAIN, **{f"{PREFIX}{p}.lora_B.bias": (n,) for p, n in ((Q0, 6), (V0, 4), (Q1, 5))},
         **{f"{PREFIX}{p}.base_layer.bias": (n,) for p, n in ((Q0, 6), (V0, 4), (Q1, 5))}}, LLAMA),
    "convolutions": Kind(
        {"net.one": ("conv", 6, 3, 3), "net.two": ("conv", 5, 3, 3, 2), "net.fc": ("linear", 7, 6)},
        CONFIG | {"target_modules": ["one", "two", "fc"]},
        {f"{PREFIX}net.one.lora_A.weight": (2, 3, 3), f"{PREFIX}net.one.lora_B.weight": (6, 2, 1),
         f"{PREFIX}net.two.lora_A.weight": (2, 3, 3, 2), f"{PREFIX}net.two.lora_B.weight": (5, 2, 1, 1),
         **pair("net.fc", 7, 6)}, {"model_type": "resnet"}),
    "embedding": Kind(
        {"model.words": ("embedding", 9, 5), Q0: ("linear", 6, 5)},
        CONFIG | {"target_modules": ["words", "q_proj"]},
        {f"{PREFIX}model.words.lora_embedding_A": (2, 9), f"{PREFIX}model.words.lora_embedding_B": (5, 2),
         **pair(Q0, 6, 5)}, LLAMA),
    "tokens": Kind(
        {"model.embed_tokens": ("embedding", 9, 5), Q0: ("linear", 6, 5)},
        CONFIG | {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [1, 7]}},
        {**pair(Q0, 6, 5), f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta": (2, 5)},
        LLAMA),
    "experts": Kind(
        {"model.layers.0.experts": ("experts", {"up": (3, 6, 5), "down": (3, 4, 6)}), Q0: ("linear", 6, 5)},
        CONFIG | {"target_modules": ["q_proj"], "target_parameters": ["experts.up", "experts.down"],
                  "lora_dropout": 0.0},
        {**pair(Q0, 6, 5), **pair("model.layers.0.experts.base_layer", 6, 5, 6),
         **pair("model.layers.0.experts", 4, 6, 6)}, {"model_type": "mixtral", "num_hidden_layers": 1}),
    "Conv1D": Kind(
        {"transformer.h.0.c_attn": ("Conv1D", 9, 5), "transformer.h.0.c_proj": ("Conv1D", 5, 5)},
        CONFIG | {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
        {**pair("transformer.h.0.c_attn", 9, 5), **pair("transformer.h.0.c_proj", 5, 5)},
        {"model_type": "gpt2", "n_layer": 1}),
    "layers repeated": Kind(
        {Q0: ("linear", 5, 5), Q1: ("linear", 5, 5), V0: ("linear", 4, 5)},
        CONFIG | {"layer_replication": [[0, 1], [0, 2]]},
        {**pair(Q0, 5, 5), **pair(Q1, 5, 5), **pair("model.layers.2.q_proj", 5, 5), **pair(V0, 4, 5),
         **pair("model.layers.1.v_proj", 4, 5)}, LLAMA),
    "AdaLoRA": Kind(
        _LINEAR, CONFIG | {"peft_type": "ADALORA", "init_r": 2, "target_r": 2, "total_step": 9, "tinit": 0,
                           "tfinal": 0, "deltaT": 1, "beta1": 0.85, "beta2": 0.85, "orth_reg_weight": 0.5,
                           "rank_pattern": None},
        {f"{PREFIX}{p}.lora_{f}": s for p, o in ((Q0, 6), (V0, 4), (Q1, 5))
         for f, s in (("A", (2, 5)), ("B", (o, 2)), ("E", (2, 1)))}, LLAMA),
}  # fmt: skip


def sound(kind: Kind, seed: int = 0, dtype: str = "F64") -> Draft:
    tensors = {key: Block(shape, dtype) for key, shape in kind.shapes.items()}
    return Draft(json.loads(json.dumps(kind.config)), tensors, seed)


# ---- grammar ---------------------------------------------------------------------------------------------------------

NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 7, 2.0, 2.5, -0.0, 0.1, 1e-3, 1e-300, 5e-324, 1e300, 1e308, 10**6, 10**30, 2**63, True, False, None,
    "2", "8.0", "false", "", [], [2], {}, [[]], Raw("1e400"), Raw("NaN"), Raw("-Infinity"), Raw("9" * 400),
    Raw("9" * 5000), Raw('"\\ud800"'), Raw("[" * 3000 + "]" * 3000),
)  # fmt: skip
ODD = (
    "\x1b[31m", "\x1b]0;x\x07", "\x9b2J", "\n", "\r", "\t", "\x00", "\x7f", "\u202e", "\u2066", "\u200b", "\u2028",
    "\ud800",
    "[red]", "[/red]", "[link=file:///etc]", ":bomb:", "|", "`", "<b>", "/", "\\", "..", "../x", "/etc/passwd", "%s",
    "{0}",
    "$(id)", "é", "ﬁ", "𝔮", "'", '"', " ", "#", "-", "a" * 300, "a" * 5000, "[0]", "(", ")", "+", "*", "lora_A",
    ".lora_A",
    ".base_layer", ".weight", ".default", ".modules_to_save", ".original_module",
)  # fmt: skip
JUNK = st.recursive(
    st.sampled_from(NUMBERS) | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)
BOMBS = ("(a+)+$", "(.*a){25}", "([a-z_.0-9]+)*$", "((a*)*)*c", "(?:.?){40}.{40}x", "(.*)*(.*)*(.*)*x",
         "a{1000}{1000}{1000}",
         "(((.{1,300}){1,300}){1,300})", "(" * 200 + ")" * 200, "a|" * 3000, "(?=(.+)+x)q")  # fmt: skip


@st.composite
def patterns(draw: Draw, names: tuple[str, ...]) -> str:
    """Regular expressions near a true name, with all that `re` knows, and some that it does not."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.sampled_from(BOMBS))
    name = draw(st.sampled_from(names))
    words = name.split(".")
    parts = words[draw(st.integers(0, len(words) - 1)) :]
    atom = st.sampled_from(
        ["[^.]+", r"\d+", ".*", ".", r"\w+", "[a-z_]+", "(?:q|v)_proj", "(q|v)_proj", r"(?P<n>\w+)", "(?i:Q_PROJ)",
         r"(?!x)\w+", r"(?<!x)\w+", r"\w++", r"(?>\w+)", r"(\w)\3*\w*", "[[:alpha:]]+", r"\p{L}+", "q_proj(?i)",
         "(?x) q_proj",
         "[a-z--x]+", r"\b\w+\b", r"\Z", "$", "^", "", "(?(1)q|v)_proj", "q_proj\n", "(", "[", "*", "a{2,1}", r"\m\w+",
         "(?:q_prxj){e<=1}", "(?V1)q_proj", "(?r)q_proj"])  # fmt: skip
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(parts) - 1))
        parts = [*parts[:at], draw(atom), *parts[at + 1 :]]
    joined = draw(st.sampled_from([".", r"\."])).join(parts)
    return (
        draw(st.sampled_from(["", "", "^", ".*", r"(.*\.)?", "(?i)", "(?s)"]))
        + joined
        + draw(st.sampled_from(["", "", "$", "|x", ".*", r"\.?"]))
    )


def near(draw: Draw, name: str) -> str:
    """A name with something odd in it, or without something."""
    at = draw(st.integers(0, len(name)))
    how = draw(st.sampled_from(["put", "put", "cut", "twice", "instead"]))
    if how == "cut":
        return name[:at]
    if how == "twice":
        return f"{name}.{name}"
    odd = draw(st.sampled_from(ODD))
    return odd if how == "instead" else name[:at] + odd + name[at:]


# ---- mutations -------------------------------------------------------------------------------------------------------

Mutation = Callable[[Draw, Draft, Kind], str]
MUTATIONS: dict[str, list[Mutation]] = {"config": [], "header": [], "data": [], "folder": []}


def mutation(group: str, weight: int = 1) -> Callable[[Mutation], Mutation]:
    def add(function: Mutation) -> Mutation:
        MUTATIONS[group] += [function] * weight
        return function

    return add


def paths(kind: Kind) -> tuple[str, ...]:
    return tuple(kind.layers)


def key_of(draw: Draw, draft: Draft) -> str:
    return draw(st.sampled_from(sorted(draft.tensors))) if draft.tensors else ""


@mutation("config", 3)
def a_field(draw: Draw, draft: Draft, kind: Kind) -> str:
    name = draw(st.sampled_from(sorted({*draft.config, "layer_replication", "megatron_core", "auto_mapping"})))
    draft.config[name] = draw(st.sampled_from(NUMBERS) | JUNK)
    return f"{name} = {str(draft.config[name])[:60]}"


@mutation("config", 2)
def scaling(draw: Draw, draft: Draft, kind: Kind) -> str:
    """Sound ones: peft takes them all."""
    alpha = st.sampled_from([1, 3, 0.5, 1e-3, 16, 2.7, 1000, 4])
    draft.config["lora_alpha"] = draw(alpha)
    draft.config["use_rslora"] = draw(st.booleans())
    return f"alpha {draft.config['lora_alpha']}, rsLoRA {draft.config['use_rslora']}"


@mutation("config", 4)
def alpha_patterns(draw: Draw, draft: Draft, kind: Kind) -> str:
    found = draw(st.lists(patterns(paths(kind)) | st.sampled_from(paths(kind)), min_size=1, max_size=3))
    draft.config["alpha_pattern"] = {p: draw(st.sampled_from([1, 2, 8, 0.3, 100])) for p in found}
    return f"alpha_pattern {found}"[:300]


@mutation("config", 2)
def rank_patterns(draw: Draw, draft: Draft, kind: Kind) -> str:
    found = draw(st.lists(patterns(paths(kind)) | st.sampled_from(paths(kind)), min_size=1, max_size=3))
    draft.config["rank_pattern"] = dict.fromkeys(found, 2)
    draft.config["r"] = draw(st.sampled_from([2, 2, 3]))
    return f"rank_pattern {found}, r {draft.config['r']}"[:300]


@mutation("config", 3)
def targets(draw: Draw, draft: Draft, kind: Kind) -> str:
    all_names = [*paths(kind), *(p.rpartition(".")[2] for p in paths(kind)), "layers", "proj", "", "all-linear"]
    names = st.lists(st.sampled_from(all_names), max_size=4) | patterns(paths(kind)) | st.sampled_from(all_names)
    name = draw(st.sampled_from(["target_modules", "exclude_modules", "modules_to_save", "target_parameters"]))
    draft.config[name] = draw(names)
    return f"{name} = {draft.config[name]!r}"[:300]


@mutation("config")
def layers(draw: Draw, draft: Draft, kind: Kind) -> str:
    draft.config["layers_to_transform"] = draw(st.sampled_from([0, 1, [0], [0, 1], [], [7], [True], [10**30], "0"]))
    draft.config["layers_pattern"] = draw(
        st.sampled_from([None, "layers", ["layers"], "h", "", [], "(?P<idx>layers)", "lay(ers", ".*"])
    )
    return f"layers {draft.config['layers_to_transform']} by {draft.config['layers_pattern']!r}"


@mutation("config")
def layers_again(draw: Draw, draft: Draft, kind: Kind) -> str:
    draft.config["layer_replication"] = draw(st.sampled_from(
        [[], [[0, 2]], [[0, 1], [0, 2]], [[1, 2], [0, 1]], [[0, 2], [1, 2]], [[0, 0]], [[0, 9]], [[2, 1]], [[0, 1, 2]],
         [[0]], [[-1, 1]], [[0, 10**6]], [[True, 2]], [[0.0, 2.0]], "x", [["0", "1"]], {"0": 1}]))  # fmt: skip
    return f"layer_replication {draft.config['layer_replication']}"


@mutation("config", 2)
def odd_text(draw: Draw, draft: Draft, kind: Kind) -> str:
    name = draw(st.sampled_from(["base_model_name_or_path", "revision", "peft_version", "task_type", "peft_type"]))
    draft.config[name] = near(draw, str(draft.config.get(name) or "some/base"))
    return f"{name} = {draft.config[name][:60]!r}"


@mutation("config")
def an_unknown_field(draw: Draw, draft: Draft, kind: Kind) -> str:
    name = near(draw, draw(st.sampled_from(["use_new", "runtime_config", "lora_parameters", "r_"])))
    draft.config[name] = draw(st.sampled_from([None, False, {}, [], 0, True, "x", {"a": 1}, "x" * 9000]))
    return f"unknown {name[:40]!r} = {str(draft.config[name])[:20]}"


@mutation("config")
def a_field_twice(draw: Draw, draft: Draft, kind: Kind) -> str:
    draft.extra_config = draw(
        st.sampled_from(['"r": 2', '"r": 4', '"\\u0072": 9', '"lora_alpha": 400', '"x": [' + "[" * 50 + "]" * 50 + "]"])
    )
    return f"and again {draft.extra_config[:20]}"


@mutation("header", 3)
def a_name(draw: Draw, draft: Draft, kind: Kind) -> str:
    """A module, or one key, under another name."""
    key = key_of(draw, draft)
    path = key.removeprefix(PREFIX).partition(".lora")[0]
    new = near(draw, path)
    whole = draw(st.booleans())
    draft.tensors = {(k.replace(path, new) if whole or k == key else k): block for k, block in draft.tensors.items()}
    if draw(st.booleans()) and isinstance(draft.config.get("target_modules"), list):
        draft.config["target_modules"] = [*draft.config["target_modules"], new]
    return f"{path} is {new[:60]!r}"


@mutation("header", 2)
def one_more(draw: Draw, draft: Draft, kind: Kind) -> str:
    path = draw(
        st.sampled_from([*paths(kind), "zzz", "model.layers.1.k_proj", "model.embed_tokens", "lm_head", "score"])
    )
    tail = draw(st.sampled_from(
        [".weight", ".bias", ".lora_B.bias", ".base_layer.weight", ".base_layer.bias", ".lora_magnitude_vector",
         ".lora_E",
         ".lora_embedding_A", ".token_adapter.trainable_tokens_delta", ".lora_A.default.weight", ".running_mean",
         "[0]"]))  # fmt: skip
    shape = draw(st.sampled_from([(), (1,), (5,), (6,), (6, 5), (5, 5), (9, 5), (2, 5), (0,), (3, 4), (2, 1)]))
    draft.tensors[f"{PREFIX}{path}{tail}"] = Block(shape, draw(st.sampled_from(["F64", "F32", "F16", "I64", "BOOL"])))
    return f"also {path}{tail} {shape}"


@mutation("header", 2)
def another_module(draw: Draw, draft: Draft, kind: Kind) -> str:
    path = draw(st.sampled_from([*paths(kind), "model.layers.1.k_proj", "zzz", "model.layers.0.experts[0]"]))
    draft.tensors |= {
        k: Block(s, "F64") for k, s in pair(path, *draw(st.sampled_from([(6, 5), (5, 5), (4, 6)]))).items()
    }
    return f"also a pair at {path}"


@mutation("header")
def one_less(draw: Draw, draft: Draft, kind: Kind) -> str:
    key = key_of(draw, draft)
    draft.tensors.pop(key, None)
    return f"no {key}"


@mutation("header", 2)
def nothing_beside(draw: Draw, draft: Draft, kind: Kind) -> str:
    """Soundly: the pairs alone, as an adapter of other settings has them."""
    if draft.config.get("trainable_token_indices"):
        return "nothing"  # all must agree on it
    draft.tensors = {k: b for k, b in draft.tensors.items() if "lora_" in k and not k.endswith(".bias")}
    draft.config |= {"modules_to_save": None, "bias": "none", "lora_bias": False}
    return "nothing beside the pairs"


@mutation("header")
def a_module_less(draw: Draw, draft: Draft, kind: Kind) -> str:
    """Soundly, where its name is not asked for: peft begins with a zero update."""
    modules = sorted({k.partition(".lora_")[0] for k in draft.tensors if ".lora_A" in k or ".lora_embedding_A" in k})
    if len(modules) < 2 or draft.config.get("target_parameters"):
        return "nothing"
    gone = draw(st.sampled_from(modules))
    draft.tensors = {k: b for k, b in draft.tensors.items() if not k.startswith(f"{gone}.")}
    return f"without {gone}"


@mutation("header", 2)
def a_shape(draw: Draw, draft: Draft, kind: Kind) -> str:
    key = key_of(draw, draft)
    old = draft.tensors[key].shape
    new = draw(st.sampled_from([old[::-1], (*old, 1), old[:-1], (1, *old), tuple(n + 1 for n in old),
                                tuple(0 for _ in old),
                                (*old[:-1], 10**6), (1,) * 20]))  # fmt: skip
    if math.prod(new) > 10**7:
        new = old[::-1]
    draft.tensors[key].shape = new
    return f"{key} is {new}"


@mutation("header", 2)
def a_rank(draw: Draw, draft: Draft, kind: Kind) -> str:
    """All pairs of two dimensions, soundly."""
    r = draw(st.sampled_from([1, 3, 9, 40]))
    if any(len(b.shape) != 2 for b in draft.tensors.values()) or draft.config.get("target_parameters"):
        return "nothing"
    for key, block in draft.tensors.items():
        d_out, d_in = block.shape
        block.shape = (r, d_in) if "_A" in key else (d_out, r) if "_B" in key else block.shape
    draft.config["r"] = r
    return f"rank {r}"


@mutation("header", 2)
def a_type(draw: Draw, draft: Draft, kind: Kind) -> str:
    dtype = draw(st.sampled_from(["F64", "F32", "F16", "BF16", "I64", "U8", "BOOL"]))
    which = [key_of(draw, draft)] if draw(st.booleans()) else list(draft.tensors)
    for key in which:
        draft.tensors[key].dtype = dtype
    return f"{len(which)} tensors are {dtype}"


@mutation("header", 2)
def what_it_says(draw: Draw, draft: Draft, kind: Kind) -> str:
    key = key_of(draw, draft)
    name = draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
    value = draw(
        JUNK | st.lists(st.integers(-1, 300), max_size=4) | st.sampled_from(["F16", "F8_E4M3", "I64", "F4", "C64"])
    )
    draft.tensors[key].says[name] = value
    return f"{key} says {name} {str(value)[:40]}"


@mutation("header")
def the_letters(draw: Draw, draft: Draft, kind: Kind) -> str:
    draft.metadata = draw(st.sampled_from([None, {"format": "pt"}, [1], {"a": 1}, "x", {"x": "\x1b[31m" * 99}]))
    how = draw(st.sampled_from(["none", "space", "cut", "trail", "length", "zeros", "BOM", "twice", "many", "deep"]))
    changes: dict[str, Callable[[bytes], bytes]] = {
        "space": lambda c: struct.pack("<Q", struct.unpack("<Q", c[:8])[0] + 3) + b"   " + c[8:],
        "cut": lambda c: c[:-3],
        "trail": lambda c: c + b"PK\x03\x04",
        "length": lambda c: struct.pack("<Q", 2**40) + c[8:],
        "zeros": lambda c: bytes(len(c)),
        "BOM": lambda c: struct.pack("<Q", struct.unpack("<Q", c[:8])[0] + 3) + b"\xef\xbb\xbf" + c[8:],
    }
    draft.damage = changes.get(how)
    if how == "twice" and draft.tensors:
        key = key_of(draw, draft)
        draft.extra_header = f'{json.dumps(key)}: {{"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}'
    if how == "deep":
        draft.extra_header = '"x": ' + "[" * 900 + "]" * 900
    if how == "many":
        line = encoded({"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})
        draft.extra_header = ", ".join(f'"{PREFIX}m{k}.lora_A.weight": {line}' for k in range(3000))
    return f"letters: {how}, metadata {str(draft.metadata)[:30]!r}"


@mutation("data", 3)
def numbers(draw: Draw, draft: Draft, kind: Kind) -> str:
    key = key_of(draw, draft)
    value = draw(st.sampled_from(
        [0.0, -0.0, 1e-45, 5e-324, 1e-310, 1e-20, 1e20, 3e38, 1e150, 1.7e308, 65504.0, math.nan, math.inf,
         -math.inf]))  # fmt: skip
    how = draw(st.sampled_from(["one", "all of it", "everywhere"]))
    for other in draft.tensors if how == "everywhere" else [key]:
        block = draft.tensors[other]
        block.numbers = np.full(block.shape, value)
        if how == "one" and block.numbers.size:
            block.numbers = np.random.default_rng(3).standard_normal(block.shape)
            block.numbers.flat[0] = value
    return f"{value} in {how} ({key})"


def linked(name: str, target: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        if not (folder / name).is_file() or (folder / name).is_symlink():
            return  # something else became of it before
        (folder.parent / "elsewhere").write_bytes((folder / name).read_bytes())
        if target == "beside":
            (folder / name).rename(folder / "other")
        else:
            (folder / name).unlink()
        (folder / name).symlink_to({"outside": "../elsewhere", "itself": name, "nothing": "no", "beside": "other",
                                    "device": "/dev/zero", "folder": "."}[target])  # fmt: skip

    return change


def instead(name: str, what: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        if (folder / name).is_dir() and not (folder / name).is_symlink():
            return
        (folder / name).unlink(missing_ok=True)
        if what == "pipe":
            os.mkfifo(folder / name)
        elif what == "folder":
            (folder / name).mkdir()
        elif what == "socket":
            here = os.getcwd()
            os.chdir(folder)  # the name of a socket has 108 letters at most
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(name)
            os.chdir(here)
        elif what == "empty":
            (folder / name).touch()

    return change


def beside(name: str, content: bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        if not os.path.lexists(folder / name) or (folder / name).is_file():
            (folder / name).write_bytes(content)

    return change


EXTRA_FILES = (
    ("adapter_model.bin", b"\x80\x04N."), ("adapter_model.safetensors.index.json", b'{"weight_map": {}}'),
    ("adapter_model-00001-of-00002.safetensors", b""), ("README.md", b"\xff\xfe"), ("upload.json", b"{"),
    ("upload.json", b'{"client": "../../x\\n", "num_examples": 3}'), ("upload.json", b'{"client": "\\ud800"}'),
    ("upload.json", b'{"client": "a", "num_examples": 1e308}'), ("adapters.safetensors", b""), (".part", b""),
)  # fmt: skip


@mutation("folder", 3)
def a_file(draw: Draw, draft: Draft, kind: Kind) -> str:
    name = draw(st.sampled_from([CONFIG_FILE, WEIGHTS_FILE]))
    how = draw(st.sampled_from(["link", "instead", "beside"]))
    if how == "link":
        target = draw(st.sampled_from(["outside", "itself", "nothing", "beside", "device", "folder"]))
        draft.more.append(linked(name, target))
        return f"{name} is a link to {target}"
    if how == "instead":
        what = draw(st.sampled_from(["pipe", "folder", "socket", "empty", "nothing"]))
        draft.more.append(instead(name, what))
        return f"{name} is {what}"
    extra, content = draw(st.sampled_from(EXTRA_FILES))
    draft.more.append(beside(extra, content))
    return f"also {extra} {content[:30]!r}"


EXAMPLES = (
    1, 3, 2.5, 0, 10**9, 1e15, 1e16, 1e-300, -1, True, None, "3", [3], Raw("NaN"), Raw("1e400"), Raw("9" * 400),
    Raw(""),
)  # fmt: skip


def upload(draft: Draft, examples: object, client: object = "acme") -> None:
    draft.more.append(beside("upload.json", encoded({"client": client, "num_examples": examples}).encode()))


@mutation("folder", 2)
def an_upload(draw: Draw, draft: Draft, kind: Kind) -> str:
    """How much it counts, by itself."""
    how = draw(st.sampled_from(["number", "number", "client", "link", "instead"]))
    upload(draft, draw(st.sampled_from(EXAMPLES)) if how == "number" else 3,
           draw(st.sampled_from(ODD)) if how == "client" else "acme")  # fmt: skip
    if how == "link":
        draft.more.append(linked("upload.json", draw(st.sampled_from(["outside", "itself", "nothing", "device"]))))
    if how == "instead":
        draft.more.append(instead("upload.json", draw(st.sampled_from(["pipe", "folder", "empty"]))))
    return f"upload.json with an odd {how}"


FOLDER_NAMES = ("[red]a", "a\nb", "a\x1b[31mb", "a\u202eb", "a|b", "-a", "$a_", "a: b", "'a", "a b", ":bomb:", "[/a]",
                "é",
                os.fsdecode(b"a\xffb"), "a" * 200, "#a", "a`b", "<b>")  # fmt: skip


@mutation("folder", 2)
def its_name(draw: Draw, draft: Draft, kind: Kind) -> str:
    draft.name = draw(st.sampled_from(FOLDER_NAMES))
    return f"the folder is {draft.name!r}"


# ---- cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """What is asked of some adapters of one kind of base.

    rank, options: of the merge. resize: options of `fedlora resize` of the first. also: "python" (the same merge by the
    function), "dry" (by --dry-run before), "force" (again over the result).
    """

    kind: str
    names: tuple[str, ...]
    rank: str = "exact"
    options: tuple[str, ...] = ()
    out: str = "out"
    resize: tuple[str, ...] = ("--rank", "1")
    also: tuple[str, ...] = ("python", "dry", "force")


@dataclass
class Case:
    """Some drafts, and what is asked of them."""

    drafts: list[Draft]
    asked: Asked

    def __repr__(self) -> str:
        said = "; ".join(f"{d.name!r}: {', '.join(d.changes) or 'sound'}" for d in self.drafts)
        asked = self.asked
        return (
            f"{asked.kind} | {said} | merge --rank {asked.rank} {' '.join(asked.options)} -> {asked.out!r}, "
            f"resize {' '.join(asked.resize)}, {' '.join(asked.also)}"
        )


def mutated(draw: Draw, draft: Draft, kind: Kind, count: int) -> None:
    for _ in range(count):
        group = draw(st.sampled_from(["config", "config", "header", "header", "data", "folder"]))
        change = draw(st.sampled_from(MUTATIONS[group]))
        if not draft.tensors:
            break
        draft.changes.append(change(draw, draft, kind))


RANKS = ("exact", "exact", "1", "2", "3", "7", "energy=0.9")
WEIGHTS = st.sampled_from([1.0, 2.0, 0.5, 0.0, 0.25, 3.0])
SIGNED = st.sampled_from([1.0, -1.0, 2.0, -0.5, 0.0, 0.7, 1e-3, 1e3])
TYPES = (["--dtype", "float64"], ["--dtype", "float32"], ["--dtype", "bfloat16"], ["--dtype", "float16"])


@st.composite
def merges(draw: Draw, count: int) -> list[str]:
    """Options of a merge of `count` adapters."""
    options: list[str] = []
    signed = draw(st.integers(0, 4)) == 0
    numbers = st.tuples(*[SIGNED if signed else WEIGHTS] * count)
    if signed:
        options += ["--sum"]
    how = draw(st.sampled_from(["alike", "alike", "weights", "examples"]))
    if how == "weights":
        options += ["--weights=" + ",".join(f"{w:g}" for w in draw(numbers))]
    if how == "examples":
        options += ["--weights-from", "num_examples"]
    options += draw(st.sampled_from([[], [], ["--missing", "renormalise"], ["--missing", "zero"]]))
    options += ["--heads", draw(st.sampled_from(["average", "average", "first", "drop"]))]
    options += draw(st.sampled_from([[], [], [], [], *TYPES]))
    return options + draw(st.sampled_from([[], [], [], [], [], ["--max-error", "0.5"]]))


@st.composite
def adapters(draw: Draw) -> tuple[str, list[Draft]]:
    """A kind, and one, two or three adapters of one base, none to three mutations each; half of them sound besides
    one."""
    name = draw(st.sampled_from(sorted(KINDS)))
    kind = KINDS[name]
    drafts: list[Draft] = []
    for k in range(draw(st.integers(1, 3))):
        draft = sound(kind, k + 1, draw(st.sampled_from(["F64", "F64", "F32", "BF16"])))
        draft.name = "abc"[k]
        mutated(draw, draft, kind, draw(st.integers(0, 3 if k == 0 else 1)))
        if any(draft.name == other.name for other in drafts):
            draft.name = "abc"[k]
        drafts.append(draft)
    return name, drafts


@st.composite
def cases(draw: Draw) -> Case:
    """Adapters, and what is asked of them."""
    name, drafts = draw(adapters())
    options = draw(merges(len(drafts)))
    if "--weights-from" in options:
        for k, draft in enumerate(drafts):
            if not any("upload.json" in change for change in draft.changes):
                upload(draft, k + draw(st.sampled_from([1, 2, 0])), f"client {k}")
    resize = ["--rank", draw(st.sampled_from(RANKS[1:])), *draw(st.sampled_from([[], [], *TYPES]))]
    out = draw(st.sampled_from(["out", "out", "out", "deep/er/out", "o" * 250, "[red]out", "out\x1b[2J"]))
    also = draw(st.lists(st.sampled_from(["python", "dry", "force"]), unique=True, max_size=2))
    names = tuple(draft.name for draft in drafts)
    rank = draw(st.sampled_from(RANKS))
    return Case(drafts, Asked(name, names, rank, tuple(options), out, tuple(resize), tuple(also)))
