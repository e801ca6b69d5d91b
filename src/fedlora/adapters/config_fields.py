"""Valid values for each field of an adapter_config.json: alone, together with others, and in their effect.

The rules are those of peft 0.21, read in its source and tested against it. We refuse by name what peft would fail on or
misread (it takes the word "false" as true), and what would make the update other than s B A. `config_meaning` derives
what the remaining fields say about modules.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

from fedlora.core.text import quoted, shown
from fedlora.errors import AdapterFormatError

Refuse = Callable[[str, str], AdapterFormatError]  # (field, why) -> the error
Test = Callable[[Any], bool]
# Fields that `config_meaning` reads, or that only describe how the adapter was trained. Those of an initialisation
# remain after peft has converted the adapter to the original base; init_lora_weights says whether it has.
# fmt: off
_TAKEN = frozenset((
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout", "lora_ga_config", "loftq_config",
    "megatron_core", "modules_to_save", "peft_version", "qalora_group_size", "revision", "target_modules", "task_type",
    "fan_in_fan_out", "runtime_config",
    "lora_dtype", "lorap_lr_ratio", "lorap_emb_lr",  # ms-swift 2's training options
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights", "bias",
))
# AdaLoRA's fields: its training options, and init_r, the divisor of its scaling.
ADALORA_FIELDS = frozenset((
    "target_r", "init_r", "tinit", "tfinal", "deltaT", "beta1", "beta2", "orth_reg_weight", "total_step",
))
# fmt: on
# Fields that change the update or its base, with the way out.
_REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA rescales rows of the base's weights, so it is no update B @ A that could be averaged; `fedlora "
    "export --for merged` writes the base model with it",
    "use_qalora": "QALoRA pools the inputs of A; not an update B @ A",
    "use_bdlora": "block-diagonal LoRA is not supported yet",
    "alora_invocation_tokens": "aLoRA applies the update to part of the tokens only",
    "arrow_config": "Arrow routes between adapters",
    "kasa_config": "KaSA changes the base weights",
    "monteclora_config": "MonteCLoRA samples its update",
    "velora_config": "VeLoRA changes how the update is computed",
    "megatron_config": "tensor-parallel layers are not supported",
}
# peft activates these whenever they are present, even as {}.
_SWITCHED_ON = ("velora_config", "kasa_config", "arrow_config", "use_bdlora", "monteclora_config")
# Fields that are allowed in files but not in models that we train.
_FILES_ONLY: Mapping[str, str] = {
    "lora_bias": "it adds a bias to the update; train with lora_bias=False",
    "target_parameters": "LoRA on bare parameters is not trained here; target modules instead",
    "trainable_token_indices": "token embeddings would be trained beside the update",
    "layer_replication": "the base model differs from the one that its name says; merge it first",
}
# Initialisations that only choose the start of A and B. Others (PiSSA, OLoRA, ...) also change the base weights.
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
_TASKS = ("SEQ_CLS", "SEQ_2_SEQ_LM", "CAUSAL_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION")
_LONGEST_TEXT, _LONGEST_NAME = 4096, 512  # letters in a path, in a module's name
_LARGEST_RANK, LARGEST_SCALE, _SMALLEST_SCALE, _LARGEST_INDEX = 1_000_000, 10_000.0, 1e-6, 2**31
_NAME = re.compile(r"[^\s./\\]+(\.[^\s./\\]+)*")


def check_config(
    config: Mapping[str, Any],
    *,
    where: str,
    in_model: bool = False,
    allow: Collection[str] = (),
    dora: bool = False,
) -> None:
    """Raise `AdapterFormatError` unless the config means W0 + s B A relative to the pre-trained weights; with `dora`,
    also the same with rescaled rows.

    An unknown field that is null, false or empty causes a warning; any other is refused, since it may change the
    update, unless it is in `allow`. in_model: the adapter is to be trained, for which we support fewer kinds.
    """

    def refuse(field: str, why: str) -> AdapterFormatError:
        return AdapterFormatError(f"{where}: {shown(field)} = {quoted(config.get(field))} is not supported: {why}.")

    ada = is_adalora(config)
    if config.get("peft_type") != "LORA" and (in_model or not ada):
        raise refuse("peft_type", "only LORA adapters can be combined (and ADALORA's, read as LORA)")
    for field, why in ({**_REFUSED, **_FILES_ONLY} if in_model else _REFUSED).items():
        if config.get(field) and not (dora and field == "use_dora"):
            raise refuse(field, why)
    if config.get("bias", "none") not in (("none",) if in_model else ("none", "all", "lora_only")):
        raise refuse("bias", "trained biases are not part of B @ A; train with bias='none'")
    init = config.get("init_lora_weights", True)
    if not isinstance(init, bool | str | None) or init not in _PLAIN_INITS:
        raise refuse(
            "init_lora_weights",
            "such an initialisation may change the base weights, so the adapter would be relative to another base; "
            "save it with peft's path_initial_model_for_weight_conversion",
        )
    for fields, test, what in (*_FIELDS, *(() if in_model else _FIELDS_OF_FILES), *(_ADALORA if ada else ())):
        for field in fields:
            if field in config and not test(config[field]):
                raise refuse(field, what)
    _check_ranks(config, refuse, ada)
    _check_together(config, refuse, in_model)
    known = _TAKEN | set(_REFUSED) | set(_FILES_ONLY) | (ADALORA_FIELDS if ada else frozenset())
    _check_unknown(config, sorted(set(config) - known - set(allow)), refuse, where)


def is_adalora(config: Mapping[str, Any]) -> bool:
    """Whether this is an AdaLoRA adapter, whose update is B diag(E) A."""
    return config.get("peft_type") == "ADALORA"


def check_scaling(scaling: float) -> None:
    if not _positive(scaling):
        raise AdapterFormatError(f"scaling is the adapter's alpha / r, a positive number; got {scaling!r}.")


def is_carried(field: str, value: Any) -> bool:
    """Whether a result keeps this field: not if it names a module for peft to import, other than one from
    transformers."""
    if field != "auto_mapping" or not isinstance(value, Mapping):
        return True
    return str(value.get("parent_library")).startswith("transformers.")


# ------------------------------------------------------------------------------------------------------- single fields


def _number(value: Any, least: float = -math.inf, most: float = math.inf) -> bool:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return known and least <= value <= most and abs(value) < math.inf


def _positive(value: Any) -> bool:
    return _number(value, 0, 1e300) and value > 0


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST_INDEX


def _is_rank(value: Any) -> bool:
    return _whole(value) and 1 <= value <= _LARGEST_RANK


def _switch(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _text(value: Any) -> bool:
    return value is None or (isinstance(value, str) and len(value) <= _LONGEST_TEXT and value.isprintable())


def _names(value: Any) -> bool:
    return value is None or (isinstance(value, list | tuple | set) and all(isinstance(name, str) for name in value))


def _module_names(value: Any) -> bool:
    return _names(value) and all(
        len(name) <= _LONGEST_NAME and name.isprintable() and _NAME.fullmatch(name) for name in value or ()
    )


def _whole_numbers(value: Any) -> bool:
    return value is None or _whole(value) or (isinstance(value, list | tuple) and all(map(_whole, value)))


def _rows(value: Any) -> bool:
    lists = list(value.values()) if isinstance(value, Mapping) else [value]
    return value is None or all(isinstance(rows, list | tuple) and all(map(_whole, rows)) for rows in lists)


def _layer_ranges(value: Any) -> bool:
    """The resulting model has as many layers as all ranges together; real ones have a few hundred."""
    if value is None or value == []:
        return True
    pairs = isinstance(value, list | tuple) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 and all(map(_whole, pair)) and pair[0] <= pair[1]
        for pair in value
    )
    return pairs and sum(last - first for first, last in value) <= 10_000


def _object(value: Any) -> bool:
    return value is None or isinstance(value, Mapping)


def _auto_mapping(value: Any) -> bool:
    """Maps names to names; Unsloth adds a boolean of its own."""
    known = isinstance(value, Mapping) and all(
        isinstance(x, bool) or (x is not None and _text(x)) for x in value.values()
    )
    return value is None or known


def _masks(value: Any) -> bool:
    """AdaLoRA's rank_pattern: which ranks it kept."""
    return _object(value) and all(
        isinstance(mask, list | tuple) and all(isinstance(x, bool) for x in mask) for mask in (value or {}).values()
    )


_FIELDS: tuple[tuple[tuple[str, ...], Test, str], ...] = (
    (("use_rslora", "use_dora", "use_qalora", "lora_bias", "fan_in_fan_out", "inference_mode", "ensure_weight_tying"),
     _switch, "it must be true or false"),
    (("base_model_name_or_path", "revision", "peft_version"), _text,
     f"it must be a name or a path of up to {_LONGEST_TEXT:,} letters, on one line"),
    (("task_type",), lambda value: value is None or (isinstance(value, str) and value in _TASKS),
     f"peft knows {', '.join(_TASKS)}"),
    (("target_modules", "exclude_modules", "layers_pattern"), lambda value: isinstance(value, str) or _names(value),
     "it must be a list of names"),
    (("modules_to_save", "target_parameters"), _module_names,
     f"it must be a list of names of modules, of up to {_LONGEST_NAME} letters"),
    (("layers_to_transform",), _whole_numbers, "it must be a list of whole numbers"),
    (("trainable_token_indices",), _rows, "it must be a list of whole numbers from 0, or one for each name"),
    (("layer_replication",), _layer_ranges, "it must be a list of [first, end] layers, up to 10,000 in all"),
    (("lora_dropout",), lambda value: _number(value, 0, 1), "it must be a number from 0 to 1"),
    (("megatron_core",), lambda value: value in (None, "megatron.core"),
     "peft would import it as a module; it must be 'megatron.core'"),
)  # fmt: skip
# Models in memory hold other types in these fields.
_FIELDS_OF_FILES: tuple[tuple[tuple[str, ...], Test, str], ...] = (
    (("eva_config", "corda_config", "loftq_config", "lora_ga_config"), _object, "it must be an object"),
    (("auto_mapping",), _auto_mapping, "it must map names to names, or to true and false"),
)
_ADALORA: tuple[tuple[tuple[str, ...], Test, str], ...] = (
    (("target_r", "tinit", "tfinal", "deltaT"), _whole, "it must be a whole number"),
    (("beta1", "beta2"), lambda value: _number(value) and 0 < value < 1, "it must be a number between 0 and 1"),
    (("rank_pattern",), _masks, "AdaLoRA maps each name to a list of true and false: the ranks it kept"),
    (("orth_reg_weight",), lambda value: _number(value, 0), "it must be a number from 0"),
)


# --------------------------------------------------------------------------------------------------- fields together


def _check_ranks(config: Mapping[str, Any], refuse: Refuse, ada: bool) -> None:
    """r and lora_alpha, and the patterns that override them for some modules."""
    r = "init_r" if ada else "r"
    if not _is_rank(config.get(r)):
        raise refuse(r, f"it must be a whole number from 1 to {_LARGEST_RANK:,}")
    if not _positive(config.get("lora_alpha")):
        raise refuse("lora_alpha", "it must be a positive number")
    for field, test in (("alpha_pattern", _positive), *(() if ada else (("rank_pattern", _is_rank),))):
        by_module = config.get(field, {})
        by_module = {} if by_module is None and ada else by_module
        if not isinstance(by_module, Mapping) or not all(test(value) for value in by_module.values()):
            raise refuse(field, "it must map patterns of module names to positive numbers, whole ones for ranks")
    alphas = [config["lora_alpha"], *(config.get("alpha_pattern") or {}).values()]
    ranks = [config[r], *(() if ada else (config.get("rank_pattern") or {}).values())]
    if max(alphas) > LARGEST_SCALE * max(ranks) or min(alphas) < _SMALLEST_SCALE * min(ranks):
        raise refuse(
            "lora_alpha" if max(alphas) == config["lora_alpha"] else "alpha_pattern",
            f"alpha / r must be {_SMALLEST_SCALE:g} to {LARGEST_SCALE:,.0f} here; real adapters have 0.1 to 100",
        )


def _check_together(config: Mapping[str, Any], refuse: Refuse, in_model: bool) -> None:
    """Combinations that peft refuses to load (`__post_init__` of LoraConfig, EvaConfig, AdaLoraConfig; ParamWrapper)"""
    for field in ("lora_dropout",) if in_model else ("lora_dropout", "lora_bias", "fan_in_fan_out"):
        if config.get("target_parameters") and config.get(field):
            raise refuse(field, "peft does not allow it with target_parameters")
    if in_model:
        return
    for field in _SWITCHED_ON:
        if config.get(field) is not None:
            raise refuse(field, "peft switches it on whenever it is present")
    init = config.get("init_lora_weights", True)
    if config.get("lora_bias") and not isinstance(init, bool):
        raise refuse("lora_bias", f"peft allows it with init_lora_weights true or false only, not {quoted(init)}")
    eva = config.get("eva_config") or {}
    if not _number(eva.get("rho", 2.0), 1) or not _number(eva.get("tau", 0.99), 0, 1):
        raise refuse("eva_config", "peft allows a rho from 1 and a tau from 0 to 1")
    tokens = config.get("trainable_token_indices")
    if tokens is not None:
        saved = set(config.get("modules_to_save") or ())
        twice = saved & set(tokens if isinstance(tokens, Mapping) else ("embed_tokens",))
        if twice:
            raise refuse(
                "trainable_token_indices", f"modules_to_save names {quoted(min(twice))} too: peft allows only one"
            )
    if is_adalora(config):
        total = config.get("total_step")
        if not _whole(total) or not total:
            raise refuse("total_step", "AdaLoRA needs a whole number of steps from 1")
        if config.get("tinit", 0) >= total - config.get("tfinal", 0):
            raise refuse("total_step", "tinit and tfinal leave no step between them, which peft refuses")
        if config.get("lora_bias"):
            raise refuse("lora_bias", "AdaLoRA has no biases: peft would leave them out")


def _check_unknown(config: Mapping[str, Any], unknown: Collection[str], refuse: Refuse, where: str) -> None:
    for field in unknown:
        if config[field]:
            raise refuse(
                field,
                "the field is unknown (a newer peft?) and may change the update; --allow-unknown treats it as harmless",
            )
    if unknown:
        first = ", ".join(f"{quoted(field, 80)} = {quoted(config[field], 80)}" for field in list(unknown)[:3])
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        warnings.warn(f"{where}: unknown field {first}{more} is ignored.", stacklevel=4)
