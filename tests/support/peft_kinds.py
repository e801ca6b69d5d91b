"""Every kind of adapter in one table: those of `peft_cases`, and layers x features on stacks of a few small layers.

A kind is two adapters that peft makes, of one base in float64. `judged` passes them through every order of saving and
loading and measures each result against peft's own dense models; nothing of fedlora computes an expected value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import AdaLoraConfig, LoHaConfig, LoKrConfig
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fedlora import read_adapter, write_adapter
from fedlora.adapters import merge
from fedlora.adapters.reader import CONFIG_FILE, WEIGHTS_FILE, AdapterFile
from fedlora.errors import FedLoRAError
from support.peft_cases import (
    CASES,
    GROUPED,
    WEIGHTS,
    Case,
    Experts,
    base_state,
    dense,
    loaded,
    lora,
    saved,
    seeded,
    without_card,
)

Build = Callable[[], nn.Module]


class Stack(nn.Module):
    """Layers under dotted names, which nobody calls: merging asks for weights only."""

    def __init__(self, layers: Mapping[str, Callable[[], nn.Module]]) -> None:
        super().__init__()
        for path, make in layers.items():
            *outer, last = path.split(".")
            home: nn.Module = self
            for name in outer:
                if name not in home._modules:
                    home.add_module(name, nn.Module())
                home = home.get_submodule(name)
            home.add_module(last, make())


def stack(**layers: Callable[[], nn.Module]) -> Build:
    """`layers_0_q=...` is layers.0.q; two underscores are one."""
    named = {name.replace("__", "\0").replace("_", ".").replace("\0", "_"): make for name, make in layers.items()}
    return seeded(lambda: Stack(named))


def both(make: Callable[[], nn.Module], other: Callable[[], nn.Module] | None = None) -> Build:
    """Two blocks of two layers called `one` and `two`, and a layer `head` that no adapter touches."""
    second = other or make
    return stack(
        blocks_0_one=make, blocks_0_two=second, blocks_1_one=make, blocks_1_two=second, head=lambda: nn.Linear(3, 2)
    )


# layer -> (the base, fields that it needs, how its adapters' modules are called)
LAYERS: dict[str, tuple[Build, dict[str, Any]]] = {
    "linear": (both(lambda: nn.Linear(5, 6), lambda: nn.Linear(6, 6, bias=False)), {}),
    "linear, one output": (both(lambda: nn.Linear(7, 1), lambda: nn.Linear(1, 7)), {}),
    "Conv1D": (both(lambda: Conv1D(6, 5), lambda: Conv1D(6, 6)), {"fan_in_fan_out": True}),
    "convolution 1d": (both(lambda: nn.Conv1d(3, 6, 3), lambda: nn.Conv1d(4, 4, 1, stride=2)), {}),
    "convolution 2d": (
        both(lambda: nn.Conv2d(3, 5, (3, 2), padding=1), lambda: nn.Conv2d(4, 4, 2, dilation=2)), {}),
    "convolution 3d": (both(lambda: nn.Conv3d(2, 4, (2, 3, 1)), lambda: nn.Conv3d(3, 3, 2)), {}),
    "embedding": (both(lambda: nn.Embedding(11, 6), lambda: nn.Embedding(6, 6)), {}),
    "experts": (
        stack(blocks_0_mix=lambda: Experts(("gate_up_proj", "down_proj"), False),
              blocks_1_mix=lambda: Experts(("gate_up_proj", "down_proj"), False)),
        {"target_modules": [], "target_parameters": ["mix.gate_up_proj", "mix.down_proj"]}),
    "experts, transposed": (
        stack(blocks_0_mix=lambda: Experts(("down_proj",), True), blocks_1_mix=lambda: Experts(("down_proj",), True)),
        {"target_modules": [], "target_parameters": ["mix.down_proj"]}),
    "attention": (both(lambda: nn.MultiheadAttention(8, 2), lambda: nn.MultiheadAttention(4, 1, bias=False)), {}),
}  # fmt: skip


def narrow(*dtypes: torch.dtype) -> Callable[[Any], None]:
    """Rounds the tensors of the files."""

    def change(model: Any) -> None:
        dtype = dtypes[model.peft_config["default"].r % len(dtypes)]
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(dtype)

    return change


def filled(part: str, value: float) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if part in name:
                parameter.data.fill_(value)

    return change


def cancelling(model: Any) -> None:
    """The second adapter's B is that of the first, times -7/3 in units of the update: the mean is zero, nearly."""
    generator = torch.Generator().manual_seed(9)
    config = model.peft_config["default"]
    scale = config.lora_alpha / config.r
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            value = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            factor = (1.0 if config.lora_alpha == 8 else -7 / 3) / scale if "_B" in name else 1.0
            parameter.data = value * factor


SAME_RANK = {"r": 4, "lora_alpha": 5}
_EPS = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# peft sorts all fields of what it saves, those of patterns too: the first match is the first by the alphabet.
PATH, PATH_LATER = r"(.*\.)?blocks\.1\..*", r"blocks\.1\..*"
# feature -> (fields of both, of the second, more of the Case)
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}, {}),
    "rank 1": ({"r": 1}, {"r": 1}, {}),
    "rank beyond the matrix": ({"r": 9}, {"r": 13}, {}),
    "rsLoRA": ({"use_rslora": True}, {}, {}),
    "rsLoRA and not": ({"use_rslora": True}, {"use_rslora": False}, {}),
    "alpha_pattern": ({"alpha_pattern": {r"blocks\.1\.one": 3}}, {"alpha_pattern": {PATH: 7, ".*": 11}}, {}),
    "rank_pattern": ({"rank_pattern": {PATH: 2}}, {"rank_pattern": {"blocks.1.one": 6, PATH_LATER: 5}}, {}),
    "float32": ({}, {}, {"alter": narrow(torch.float32), "tolerance": _EPS[torch.float32]}),
    "bfloat16": ({}, {}, {"alter": narrow(torch.bfloat16), "tolerance": _EPS[torch.bfloat16]}),
    "zero": ({}, {}, {"alter": filled("lora_B", 0.0)}),
}

# Kinds of their own.
LINEAR = LAYERS["linear"][0]
DEEP = stack(**{f"model_blocks_{k}_{name}": (lambda: nn.Linear(5, 6)) for k in (0, 1) for name in ("one", "two")})
TWO = {"target_modules": ["one", "two"]}


def plain(
    fields: Mapping[str, Any], second: Mapping[str, Any] | None = None, build: Build = LINEAR, **more: Any
) -> Case:
    return lora(build, TWO | dict(fields), second, **more)


MORE: dict[str, Case] = {
    "first match wins": plain(
        {"alpha_pattern": {r".*\.one": 3, "one": 90}, "rank_pattern": {r"blocks.*": 2, "one": 7}}),
    "a key that looks like a pattern": plain(
        {"alpha_pattern": {"blocks.0.one": 3}}, {"alpha_pattern": {"b.ocks.0.one": 3}}),
    "alternatives": plain({"alpha_pattern": {"one|two": 3}, "rank_pattern": {"(?:blocks\\.0\\.)(one|two)": 2}}),
    "looking ahead": plain(
        {"alpha_pattern": {r"blocks\.(?!0)\d+\.one": 3}}, {"rank_pattern": {r".*(?=0\.t)0\.two": 2}}),
    "a pattern of nothing": plain({"rank_pattern": {"three": 2}, "alpha_pattern": {"": 5}}),
    "alpha below 1": plain({"lora_alpha": 0.125}, {"lora_alpha": 1e-3}),
    "alpha that is no whole number": plain({"lora_alpha": 2.7}, {"lora_alpha": 3.14159}),
    "a large alpha": plain({"lora_alpha": 4096}, {"lora_alpha": 1}),
    "dropout": plain({"lora_dropout": 0.4}),
    "gaussian": plain({"init_lora_weights": "gaussian"}),
    "random B": plain({"init_lora_weights": False}),
    "orthogonal": plain({"init_lora_weights": "orthogonal", "r": 4}, {"r": 2}),
    "full paths": plain({"target_modules": ["blocks.0.one", "blocks.1.two"]}, {"target_modules": ["blocks.0.one"]}),
    "suffix and path": plain({"target_modules": ["one"]}, {"target_modules": ["blocks.0.one", "two"]}),
    "regex targets": plain({"target_modules": r"blocks\.\d\.(one|two)"}, {"target_modules": r".*(?<!1)\.two"}),
    "excluded by path": plain({"exclude_modules": ["blocks.0.one"]}, {"exclude_modules": r".*\.two"}),
    "one layer": plain(
        {"layers_to_transform": 1, "layers_pattern": "blocks"},
        {"layers_to_transform": [0, 1], "layers_pattern": ["blocks"]}),
    "one layer, without a pattern": plain({"layers_to_transform": 1}, {"layers_to_transform": [1, 0]}, build=DEEP),
    "no module in common": plain({"target_modules": ["one"]}, {"target_modules": ["two"]}),
    "all-linear here": plain({"target_modules": "all-linear"}),
    "bias all, here": plain({"bias": "all"}),
    "bias lora_only, here": plain({"bias": "lora_only"}, build=both(lambda: nn.Linear(5, 6))),
    "lora_bias, here": plain({"lora_bias": True}, build=both(lambda: nn.Linear(5, 6))),
    "lora_bias, bias lora_only": plain(
        {"lora_bias": True, "bias": "lora_only"}, build=both(lambda: nn.Linear(5, 6))),
    "a saved module": plain({"modules_to_save": ["head"]}),
    "two saved modules": plain({"target_modules": ["one"], "modules_to_save": ["head", "blocks.0.two"]}),
    "a saved convolution": plain(
        {"target_modules": ["two"], "modules_to_save": ["one"]}, build=LAYERS["convolution 2d"][0]),
    "float16": plain({}, alter=narrow(torch.float16), tolerance=_EPS[torch.float16]),
    "float32 and float64": plain({}, alter=narrow(torch.float32, torch.float64), tolerance=1e-6),
    "bfloat16 and float32": plain({}, alter=narrow(torch.bfloat16, torch.float32), tolerance=1e-2),
    "large numbers": plain({}, alter=filled("lora_A", 1e12)),
    "small numbers": plain({}, alter=filled("lora_A", 1e-6), tolerance=1e-9),
    "updates that cancel": plain({}, SAME_RANK, alter=cancelling),
    "one linear, one convolution": plain(
        {"target_modules": ["one"]}, {"target_modules": ["two"]},
        build=both(lambda: nn.Linear(5, 6), lambda: nn.Conv2d(3, 4, 2))),
    "linear, embedding, convolution": plain(
        {"target_modules": ["one", "two", "head"]}, {"target_modules": ["one", "head"]},
        build=both(lambda: nn.Embedding(9, 5), lambda: nn.Conv1d(3, 4, 2))),
    "experts and a layer": lora(
        stack(blocks_0_mix=lambda: Experts(("up_proj", "down_proj"), False), blocks_0_one=lambda: nn.Linear(5, 6)),
        {"target_modules": ["one"], "target_parameters": ["mix.down_proj"]}),
    "one expert": lora(
        stack(mix=lambda: _expert(1), head=lambda: nn.Linear(3, 2)),
        {"target_modules": [], "target_parameters": ["mix.weight"]}),
    "forty experts": lora(
        stack(mix=lambda: _expert(40), head=lambda: nn.Linear(3, 2)),
        {"target_modules": [], "target_parameters": ["mix.weight"]}, {"r": 2}),
    "a bare matrix": lora(
        stack(mix=lambda: _expert(0), head=lambda: nn.Linear(3, 2)),
        {"target_modules": [], "target_parameters": ["mix.weight"]}),
    "odd names": lora(
        stack(**{"a+b_q": lambda: nn.Linear(5, 6), "block(1)_q": lambda: nn.Linear(5, 6)}),
        {"target_modules": ["q"], "rank_pattern": {r"block\(1\)\.q": 2}}),
    "a name that is its own pattern": lora(
        stack(**{"a+b_q": lambda: nn.Linear(5, 6), "c_q": lambda: nn.Linear(5, 6)}),
        {"target_modules": ["q"], "alpha_pattern": {"a+b.q": 3}}),
    "names that end in a number": lora(
        stack(layers_0=lambda: nn.Linear(5, 6), layers_10=lambda: nn.Linear(5, 6), layers_1=lambda: nn.Linear(5, 6)),
        {"target_modules": ["layers.1", "layers.10"], "rank_pattern": {"1": 2, "layers.10": 3}},
        {"target_modules": ["0", "1"]}),
}  # fmt: skip


def _expert(count: int) -> nn.Module:
    """`count` matrices in one parameter; 0: a matrix."""
    module = nn.Module()
    module.weight = nn.Parameter(0.3 * torch.randn((count, 4, 5) if count else (4, 5)))
    return module


def adalora(build: Build, fields: Mapping[str, Any], **more: Any) -> Case:
    common = {"target_r": 2, "lora_alpha": 8, "total_step": 10, "tinit": 1, "tfinal": 2, "init_r": 5}
    return Case(build, common | TWO | dict(fields), common | TWO | dict(fields) | {"init_r": 3, "lora_alpha": 3},
                configs=(AdaLoraConfig, AdaLoraConfig), **more)  # fmt: skip


MORE |= {
    "AdaLoRA, here": adalora(LINEAR, {}),
    "AdaLoRA, Conv1D, here": adalora(LAYERS["Conv1D"][0], {"fan_in_fan_out": True}),
    "AdaLoRA, lm_head": adalora(stack(one=lambda: nn.Linear(5, 6), lm__head=lambda: nn.Linear(6, 9)),
                                {"target_modules": ["one", "lm_head"]}),
}  # fmt: skip


def edited(case: Case, **fields: Any) -> Case:
    """As somebody edits the file by hand, or as a newer peft writes it: peft itself does not make these here."""

    def change(model: Any) -> None:
        model.edited = fields

    return replace(case, alter=change)


def SINGLE() -> nn.Module:  # what these initialisations ask for
    return LINEAR().float()


# what -> (a case, words of the refusal). Made by peft, or by hand where peft needs data or hardware to make it.
REFUSED: dict[str, tuple[Case, str]] = {
    "DoRA": (plain({"use_dora": True}), "use_dora"),
    "PiSSA": (plain({"init_lora_weights": "pissa"}, build=SINGLE), "init_lora_weights"),
    "PiSSA by iteration": (plain({"init_lora_weights": "pissa_niter_4"}, build=SINGLE), "init_lora_weights"),
    "OLoRA": (plain({"init_lora_weights": "olora"}, build=SINGLE), "init_lora_weights"),
    "CorDA": (edited(plain({}), init_lora_weights="corda"), "init_lora_weights"),
    "LoftQ": (edited(plain({}), init_lora_weights="loftq"), "init_lora_weights"),
    "LoRA-GA": (edited(plain({}), init_lora_weights="lora_ga"), "init_lora_weights"),
    "QALoRA": (edited(plain({}), use_qalora=True), "use_qalora"),
    "block-diagonal": (edited(plain({}), use_bdlora={"nblocks": 2}), "use_bdlora"),
    "aLoRA": (edited(plain({}), alora_invocation_tokens=[1, 2]), "alora_invocation_tokens"),
    "Arrow": (edited(plain({}), arrow_config={"arrow_top_k": 2}), "arrow_config"),
    "KaSA": (edited(plain({}), kasa_config={"beta": 1}), "kasa_config"),
    "MonteCLoRA": (edited(plain({}), monteclora_config={"n": 1}), "monteclora_config"),
    "VeLoRA": (edited(plain({}), velora_config={"n": 1}), "velora_config"),
    "Megatron": (edited(plain({}), megatron_config={"n": 1}), "megatron_config"),
    "a field of the future": (edited(plain({}), use_new_thing=True), "use_new_thing"),
    "grouped convolution": (lora(GROUPED, {"target_modules": ["grouped"], "r": 2}, {"r": 2}), "grouped"),
    "LoHa": (Case(LINEAR, TWO, TWO, configs=(LoHaConfig, LoHaConfig)), "peft_type"),
    "LoKr": (Case(LINEAR, TWO, TWO, configs=(LoKrConfig, LoKrConfig)), "peft_type"),
    "experts of different alphas": (
        lora(LAYERS["experts"][0], LAYERS["experts"][1] | {"alpha_pattern": {"down_proj": 2}}), "alpha_pattern"),
    "looking behind": (plain({"rank_pattern": {r".*(?<=0\.)two": 2}}), "rank_pattern"),
    "a back reference": (plain({"alpha_pattern": {r"bl(o)cks\.0\.\3ne": 3}}), "alpha_pattern"),
    "inline flags": (plain({"alpha_pattern": {"(?i:ONE)": 3}}), "alpha_pattern"),
    "bias of one only": (plain({"bias": "all"}, {"bias": "none"}), "bias"),
    "a saved module of one only": (plain({"modules_to_save": ["head"]}, {"modules_to_save": None}), "--heads first"),
    "a name beyond ASCII": (
        lora(stack(**{"ä_q": lambda: nn.Linear(4, 3)}), {"target_modules": ["q"]}), "an impossible name"),
    "the prefix as a name": (
        lora(stack(base__model_model_q=lambda: nn.Linear(5, 6)), {"target_modules": ["q"]}), "the prefix twice"),
    "the prefix once and twice": (
        lora(stack(base__model_model_q=lambda: nn.Linear(5, 6), q=lambda: nn.Linear(4, 3)), {"target_modules": ["q"]}),
        "the prefix twice"),
    "tokens of other rows": (
        lora(stack(embed__tokens=lambda: nn.Embedding(9, 4), one=lambda: nn.Linear(5, 6)),
             {"target_modules": ["one"], "trainable_token_indices": {"embed_tokens": [1, 2]}},
             {"trainable_token_indices": {"embed_tokens": [1, 3]}}), "trainable_token_indices"),
}  # fmt: skip


def _grid() -> dict[str, Case]:
    found = {}
    for layer, (build, needs) in LAYERS.items():
        for feature, (fields, second, more) in FEATURES.items():
            found[f"{layer}: {feature}"] = lora(build, TWO | needs | fields, second, **more)
    return found


KINDS: dict[str, Case] = {**CASES, **_grid(), **MORE}


# ---- the judgement ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    """Relative errors over all tensors that the adapters change. copied: read, written and loaded by peft. saved: that
    saved again by peft and read. merged: of the mean with weights 0.7 and 0.3. again: that merged with the first, half
    and half. rounding: what storing the merged numbers in their type may cost."""

    copied: float
    saved: float
    merged: float
    again: float
    rounding: float

    def within(self, tolerance: float) -> bool:
        """Copies up to the tolerance, merges up to the rounding of their type as well."""
        merges = max(tolerance, self.rounding)
        return max(self.copied, self.saved) <= tolerance and max(self.merged, self.again) <= merges


State = Mapping[str, Tensor]


_ROUNDING = {"F64": 0.0, "F32": 1e-6, "F16": 2e-3, "BF16": 1e-2}


def rounding(folder: Path) -> float:
    """Of the coarsest type of floating-point numbers that a file holds."""
    with (folder / WEIGHTS_FILE).open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return max(_ROUNDING.get(line["dtype"], 0.0) for name, line in header.items() if name != "__metadata__")


def updates(model: nn.Module, base: State) -> dict[str, Tensor]:
    """What a dense model has and the base has not."""
    return {k: t.double() - base[k].double() for k, t in model.state_dict().items()}


def distance(got: State, want: State, scale: State) -> float:
    """||got - want|| / ||scale||, over all keys; zero updates must be zero."""
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    for key, tensor in scale.items():
        if not bool(tensor.any()):
            assert not bool(got[key].any()), f"{key} is changed, and no adapter changes it"
    gap, size = (sum(float(t.square().sum()) for t in ts) for ts in ([got[k] - want[k] for k in want], scale.values()))
    return float((gap / size) ** 0.5) if size else float(gap**0.5)


def made(case: Case, which: int, folder: Path) -> Path:
    """The adapter as peft saves it, with what `edited` changes in its config."""
    edit: dict[str, Any] = {}
    if case.alter is not None:
        alter = case.alter

        def change(model: Any) -> None:
            alter(model)
            edit.update(getattr(model, "edited", {}))

        case = replace(case, alter=change)
    saved(case, which, folder)
    if edit:
        config = json.loads((folder / CONFIG_FILE).read_text())
        (folder / CONFIG_FILE).write_text(json.dumps(config | edit))
    return folder


@torch.no_grad()
def judged(case: Case, root: Path, dtype: str | None = None) -> Judged:
    """dtype: of the merges. Raises what fedlora or peft raise."""
    one, two = (made(case, k, root / name) for k, name in enumerate("ab"))
    base = base_state(case)
    A, B = (updates(dense(case, folder), base) for folder in (one, two))
    size = {k: A[k].abs() + B[k].abs() for k in A}

    write_adapter(root / "copy", *read_adapter(one))
    copied = distance(updates(dense(case, root / "copy"), base), A, A)
    model = loaded(case, root / "copy")
    without_card(model).save_pretrained(root / "saved")
    first, second = AdapterFile(one), AdapterFile(root / "saved")
    again = {m: second.lora(m).delta().double() for m in second.modules}
    before = {m: first.lora(m).delta().double() for m in first.modules}
    resaved = distance(again, before, before)

    merge([one, two], root / "m", weights=WEIGHTS, missing="zero", dtype=dtype)
    mean = {k: WEIGHTS[0] * A[k] + WEIGHTS[1] * B[k] for k in A}
    merged = distance(updates(dense(case, root / "m"), base), mean, size)
    merge([root / "m", one], root / "mm", missing="zero", dtype=dtype)
    last = distance(updates(dense(case, root / "mm"), base), {k: (mean[k] + A[k]) / 2 for k in A}, size)
    return Judged(copied, resaved, merged, last, max(rounding(root / "m"), rounding(root / "mm")))


def refusal(case: Case, root: Path) -> str:
    """The line that refuses the first adapter by itself, or the merge of both."""
    one, two = (made(case, k, root / name) for k, name in enumerate("ab"))
    try:
        for folder in (one, two):
            AdapterFile(folder)
        merge([one, two], root / "m", missing="zero")
    except FedLoRAError as error:
        return str(error)
    return ""
