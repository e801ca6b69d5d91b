"""What an adapter_config.json may say: the fields that we read, those that change nothing, and every other by name.

Read without a base model: LoRA and rsLoRA of linear layers, with ranks and alphas by name, and modules_to_save. The
modules are those of the file, whatever target_modules and its companions say: peft would load no other factors. So no
pattern of a stranger is ever given to `re`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fedlora.core.text import quoted, shown
from fedlora.errors import AdapterFormatError

WAY_OUT = (
    "With the base model, peft merges such an adapter: PeftModel.from_pretrained(model, folder).merge_and_unload()"
)
# Fields that we read, and fields without an effect on W0 + s B A: of training, of a start that peft has converted back
# to the original base (init_lora_weights says whether it has), and those that choose modules.
# fmt: off
_TAKEN = frozenset((
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save", "bias",
    "init_lora_weights", "auto_mapping", "base_model_name_or_path", "revision", "task_type", "fan_in_fan_out",
    "corda_config", "eva_config", "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform",
    "loftq_config", "lora_dropout", "lora_dtype", "lora_ga_config", "lorap_emb_lr", "lorap_lr_ratio", "megatron_core",
    "peft_version", "qalora_group_size", "runtime_config", "target_modules",
))
# fmt: on
_DORA = (
    "DoRA rescales rows of the base's weights, so it is no update B A that could be averaged. `fedlora export --format "
    "merged` writes the base model with it"
)
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")  # PiSSA, OLoRA, ... also change the base weights
_TASKS = (None, "SEQ_CLS", "SEQ_2_SEQ_LM", "CAUSAL_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION")
_NAME, _DOT = re.compile(r"[\w-]+(\.[\w-]+){0,15}", re.ASCII), re.compile(r"\.")
_NAME_LETTERS, _MOST_SAVED, _LARGEST_RANK, _LARGEST_ALPHA, _LONGEST_TEXT = 256, 32, 10**6, 1e9, 4096


def check_config(config: Mapping[str, Any], *, dora: bool = False) -> None:
    """Raise `AdapterFormatError` unless the config means W0 + s B A. dora: allow rescaled rows too."""

    def refuse(field: str, why: str) -> AdapterFormatError:
        return AdapterFormatError(f"{shown(field, 80)} = {quoted(config.get(field), 80)} is not supported: {why}.")

    if config.get("peft_type") != "LORA":
        raise refuse("peft_type", f"only LORA is read. {WAY_OUT}")
    for field, value in config.items():
        # {} is not empty here: peft switches on velora_config and others whenever they are there
        empty = value is None or value is False or value in ("", [])
        if not (empty or field in _TAKEN or (dora and field == "use_dora" and value is True)):
            raise refuse(field, f"{_DORA if field == 'use_dora' else 'the update may not be s B A'}. {WAY_OUT}")
    if config.get("bias") not in (None, "none"):
        raise refuse("bias", f"trained biases are no part of B A. {WAY_OUT}")
    init = config.get("init_lora_weights")
    if init not in _PLAIN_INITS:
        raise refuse(
            "init_lora_weights",
            "such a start may change the base weights, so the update is of another base. Save it with peft's "
            "path_initial_model_for_weight_conversion",
        )
    for field in ("use_rslora", "fan_in_fan_out"):  # peft takes the word "false" as true
        if not isinstance(config.get(field), bool | None):
            raise refuse(field, "it must be true or false")
    for field in ("base_model_name_or_path", "revision"):
        text = config.get(field)
        if not (text is None or (isinstance(text, str) and len(text) <= _LONGEST_TEXT and text.isprintable())):
            raise refuse(field, f"it must be a name of up to {_LONGEST_TEXT:,} letters, on one line")
    if not isinstance(config.get("task_type"), str | None) or config.get("task_type") not in _TASKS:
        raise refuse("task_type", f"peft knows {', '.join(_TASKS[1:])}")
    saved = config.get("modules_to_save")
    if saved is not None and not (isinstance(saved, list) and len(saved) <= _MOST_SAVED and all(map(is_name, saved))):
        raise refuse("modules_to_save", f"it must be a list of up to {_MOST_SAVED} names of modules")
    if type(config.get("r")) is not int or not 0 < config["r"] <= _LARGEST_RANK:
        raise refuse("r", f"it must be a whole number from 1 to {_LARGEST_RANK:,}")
    if not _is_alpha(config.get("lora_alpha")):
        raise refuse("lora_alpha", f"it must be a number above 0 and up to {_LARGEST_ALPHA:g}")
    for field in ("rank_pattern", "alpha_pattern"):
        by_name = config.get(field) or {}
        if not isinstance(by_name, Mapping):
            raise refuse(field, "it must map names of modules to numbers")
        for name, value in by_name.items():
            if not is_name(_bare(name)):
                raise refuse(field, f"{quoted(name, 80)} is a pattern; write the names of the modules instead")
            if not (type(value) is int and 0 < value <= _LARGEST_RANK if field == "rank_pattern" else _is_alpha(value)):
                raise refuse(field, f"{quoted(value, 40)} is no {field.removesuffix('_pattern')}")


def is_name(text: object) -> bool:
    """Whether this is the name of a module, or the end of one: no pattern."""
    return isinstance(text, str) and len(text) <= _NAME_LETTERS and _NAME.fullmatch(text) is not None


class ByName:
    """r and rank_pattern, or lora_alpha and alpha_pattern, of a checked config. As in peft, the first name counts that
    is the module's name or its end; one that begins with ^ is the whole name."""

    def __init__(self, default: float, by_name: Mapping[str, Any] | None) -> None:
        self._found: dict[str, tuple[int, float]] = {}  # name -> (its place in the config, the value)
        for place, (name, value) in enumerate((by_name or {}).items()):
            self._found.setdefault(("^" if name.startswith("^") else "") + _bare(name), (place, value))
        self._default = (0, default)

    def value(self, module: str) -> float:
        if not self._found:
            return self._default[1]
        ends = (module[dot.end() :] for dot in _DOT.finditer(module))
        names = (name for name in (f"^{module}", module, *ends) if name in self._found)
        return min((self._found[name] for name in names), default=self._default)[1]


def _bare(name: object) -> str:
    return str(name).removeprefix("^").removesuffix("$").replace(r"\.", ".").replace(r"\-", "-")


def _is_alpha(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= _LARGEST_ALPHA
