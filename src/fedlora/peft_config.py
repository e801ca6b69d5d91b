"""What an adapter_config.json of PEFT means: which modules, at which rank and scaling, saved how - or why not.

Rules of peft 0.21, read in its source and tested against it. No tensors and no files here.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from fedlora.errors import AdapterFormatError
from fedlora.lora import Adapter

# Fields of adapter_config.json (peft 0.21) that leave the update alone, whatever their value. Those of an
# initialisation stay after peft has converted the adapter to the original base; init_lora_weights says whether it has.
# fmt: off
_HARMLESS = frozenset((
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout", "lora_ga_config", "loftq_config",
    "megatron_core", "modules_to_save", "peft_version", "qalora_group_size", "revision", "target_modules", "task_type",
    "fan_in_fan_out", "runtime_config",
))
# Fields that we apply ourselves.
_APPLIED = frozenset((
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights", "bias",
))
# fmt: on
# Fields that change the update or what it is relative to, with the way out.
_REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA's magnitudes are not linear in the update; merge it into the base model first",
    "lora_bias": "it adds a bias to the update; train with lora_bias=False",
    "target_parameters": "LoRA on bare parameters is not supported yet; target modules instead",
    "trainable_token_indices": "token embeddings are trained beside the update; not supported yet",
    "layer_replication": "the base model is another one than its name says; merge it first",
    "use_qalora": "QALoRA pools the inputs of A; not an update B @ A",
    "use_bdlora": "block-diagonal LoRA is not supported yet",
    "alora_invocation_tokens": "aLoRA applies the update to part of the tokens only",
    "arrow_config": "Arrow routes between adapters",
    "kasa_config": "KaSA changes the base weights",
    "monteclora_config": "MonteCLoRA samples its update",
    "velora_config": "VeLoRA changes how the update is computed",
    "megatron_config": "tensor-parallel layers are not supported",
}
# Initialisations that only choose where A and B start. Others (PiSSA, OLoRA, ...) change the base weights too.
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


def check_config(config: Mapping[str, Any], *, where: str) -> None:
    """Raises `AdapterFormatError` unless the config means W0 + s B A relative to the pre-trained weights.

    An unknown field that is null, false or empty is warned about; any other is refused, since it may change the update.
    """

    def refuse(field: str, why: str) -> AdapterFormatError:
        return AdapterFormatError(f"{where}: {field} = {config.get(field)!r} is not supported: {why}.")

    if str(config.get("peft_type")).upper().removeprefix("PEFTTYPE.") != "LORA":
        raise refuse("peft_type", "only LORA adapters can be combined")
    for field, why in _REFUSED.items():
        if config.get(field):
            raise refuse(field, why)
    if config.get("bias", "none") != "none":
        raise refuse("bias", "trained biases are no part of B @ A; train with bias='none'")
    if config.get("init_lora_weights", True) not in _PLAIN_INITS:
        raise refuse(
            "init_lora_weights",
            "such an initialisation may change the base weights, and the adapter is then relative to another base; "
            "save it with peft's path_initial_model_for_weight_conversion",
        )
    for field, patterns in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
        if not _positive(config.get(field)):
            raise refuse(field, "it must be a positive number")
        by_module = config.get(patterns) or {}
        if not isinstance(by_module, Mapping) or not all(_positive(value) for value in by_module.values()):
            raise refuse(patterns, "it must map patterns of module names to positive numbers")
    for field in sorted(set(config) - _HARMLESS - _APPLIED - set(_REFUSED)):
        if config[field]:
            raise refuse(field, "the field is unknown (a newer peft?) and may change the update")
        warnings.warn(f"{where}: unknown field {field!r} = {config[field]!r} is ignored.", stacklevel=3)


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def check_scaling(scaling: float) -> None:
    if not _positive(scaling):
        raise AdapterFormatError(f"scaling is the adapter's alpha / r, a positive number; got {scaling!r}.")


def module_rank(config: Mapping[str, Any], module: str) -> int:
    """r of one module, by rank_pattern."""
    rank: int = _by_pattern(config.get("rank_pattern") or {}, module, config["r"])
    return rank


def relative_scaling(config: Mapping[str, Any], module: str, scaling: float) -> float:
    """(the module's own alpha / r, or alpha / sqrt(r) with rsLoRA) / scaling; 1.0 exactly where they are the same."""
    r = module_rank(config, module)
    alpha = _by_pattern(config.get("alpha_pattern") or {}, module, config["lora_alpha"])
    if config.get("use_rslora"):
        return float(alpha / math.sqrt(r) / scaling)
    return 1.0 if alpha == scaling * r else float(alpha / r / scaling)  # (s r) / r need not be s in floats


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """PEFT's rule: keys are regular expressions for the end of the module path; the first match in file order wins."""
    for key, value in patterns.items():
        try:
            if re.match(rf"(.*\.)?({key})$", module):
                return value
        except re.error as error:
            raise AdapterFormatError(f"pattern {key!r} is not a regular expression: {error}.") from error
    return default


def is_head(path: str, config: Mapping[str, Any]) -> bool:
    """PEFT's rule: a module is saved in full if its path ends with one of modules_to_save (not: equals)."""
    saved = config.get("modules_to_save") or []
    return any(re.search(rf"{re.escape(module)}\.(?!.*(lora_|base_layer))", path) for module in saved)


def targets_for(config: Mapping[str, Any], adapter: Adapter) -> dict[str, Any]:
    """The spec's own targets where they mean all of the adapter's modules; else the modules by their full paths."""
    if all(_is_targeted(name, config) for name in adapter.modules):
        return {}
    nothing = dict.fromkeys(("exclude_modules", "layers_to_transform", "layers_pattern"))
    return {"target_modules": list(adapter.modules), **nothing}


def _is_targeted(module: str, config: Mapping[str, Any]) -> bool:
    """PEFT's rule for whether a config puts LoRA on `module`."""

    def named(names: str | Sequence[str]) -> bool:
        if isinstance(names, str):
            return bool(re.fullmatch(names, module))
        return any(module == name or module.endswith(f".{name}") for name in names)

    if not named(config.get("target_modules") or ()) or named(config.get("exclude_modules") or ()):
        return False
    layers = config.get("layers_to_transform")
    if layers is None:
        return True
    patterns = config.get("layers_pattern") or [r"[^.]*"]
    found = [re.match(rf"(?:^|.*?\.){p}\.(\d+)\.", module) for p in _listed(patterns)]
    index = next((int(match[1]) for match in found if match), None)
    return index is not None and index in _listed(layers)


def saved_modules_for(config: Mapping[str, Any], adapter: Adapter) -> dict[str, Any]:
    """modules_to_save as the heads need it: peft demands every one that it names, and reads no other."""
    if not adapter.heads:
        # peft adds a classifier to modules_to_save for these tasks, and would then miss it in the file.
        classifies = config.get("task_type") in ("SEQ_CLS", "TOKEN_CLS")
        return {"modules_to_save": None} | ({"task_type": None} if classifies else {})
    if all(is_head(path, config) for path in adapter.heads):
        return {}
    return {"modules_to_save": sorted({path.rpartition(".")[0] for path in adapter.heads})}


def _listed(value: Any) -> Sequence[Any]:
    return [value] if isinstance(value, str | int) else value


def alpha_for(scaling: float, r: int) -> float | int:
    alpha = scaling * r
    return int(alpha) if alpha == int(alpha) else alpha
