"""What the value of each field of an adapter_config.json must be, before it is asked what it means.

As peft 0.21 takes them: what it would fail on, or read as something else ("false", a word, is yes), is refused here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from fedlora.errors import AdapterFormatError

_LONGEST_TEXT, _LONGEST_NAME = 4096, 512  # letters of a path, of a module's name
_LARGEST_INDEX = 2**31
_NAME = re.compile(r"[^\s./\\]+(\.[^\s./\\]+)*")
_TASKS = ("SEQ_CLS", "SEQ_2_SEQ_LM", "CAUSAL_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION")
Test = Callable[[Any], bool]


def _switch(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _text(value: Any) -> bool:
    return value is None or (isinstance(value, str) and len(value) <= _LONGEST_TEXT and value.isprintable())


def _names(value: Any) -> bool:
    return value is None or (isinstance(value, list | tuple | set) and all(isinstance(name, str) for name in value))


def _names_or_pattern(value: Any) -> bool:
    return isinstance(value, str) or _names(value)


def _module_names(value: Any) -> bool:
    return _names(value) and all(
        len(name) <= _LONGEST_NAME and name.isprintable() and _NAME.fullmatch(name) for name in value or ()
    )


def _share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST_INDEX


def _whole_numbers(value: Any) -> bool:
    return value is None or _whole(value) or (isinstance(value, list | tuple) and all(map(_whole, value)))


def _rows(value: Any) -> bool:
    lists = list(value.values()) if isinstance(value, Mapping) else [value]
    return value is None or all(isinstance(rows, list | tuple) and all(map(_whole, rows)) for rows in lists)


def _layer_ranges(value: Any) -> bool:
    """The new model has as many layers as all ranges together: some hundred."""
    if value is None or value == []:
        return True
    pairs = isinstance(value, list | tuple) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 and all(map(_whole, pair)) and pair[0] <= pair[1]
        for pair in value
    )
    return pairs and sum(last - first for first, last in value) <= 10_000


def _object(value: Any) -> bool:
    return value is None or isinstance(value, Mapping)


def _mapping_of_texts(value: Any) -> bool:
    texts = isinstance(value, Mapping) and all(isinstance(text, str) and _text(text) for text in value.values())
    return value is None or texts


_FIELDS: tuple[tuple[tuple[str, ...], Test, str], ...] = (
    (("use_rslora", "use_dora", "use_qalora", "lora_bias", "fan_in_fan_out", "inference_mode", "ensure_weight_tying"),
     _switch, "it must be true or false"),
    (("base_model_name_or_path", "revision", "peft_version"), _text,
     f"it must be a name or a path of up to {_LONGEST_TEXT:,} letters, on one line"),
    (("task_type",), lambda value: value is None or (isinstance(value, str) and value in _TASKS),
     f"peft knows {', '.join(_TASKS)}"),
    (("target_modules", "exclude_modules", "layers_pattern"), _names_or_pattern, "it must be a list of names"),
    (("modules_to_save", "target_parameters"), _module_names,
     f"it must be a list of names of modules, of up to {_LONGEST_NAME} letters"),
    (("layers_to_transform",), _whole_numbers, "it must be a list of whole numbers"),
    (("trainable_token_indices",), _rows, "it must be a list of whole numbers from 0, or one for each name"),
    (("layer_replication",), _layer_ranges, "it must be a list of [first, end] layers, up to 10,000 in all"),
    (("lora_dropout",), _share, "it must be a number from 0 to 1"),
    (("megatron_core",), lambda value: value in (None, "megatron.core"),
     "peft would import it as a module; it must be 'megatron.core'"),
)  # fmt: skip
_FILES_ONLY: tuple[tuple[tuple[str, ...], Test, str], ...] = (
    (("eva_config", "corda_config", "loftq_config", "lora_ga_config"), _object, "it must be an object"),
    (("auto_mapping",), _mapping_of_texts, "it must map names to names"),
)  # models in memory have values of other types there


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_ADALORA: tuple[tuple[tuple[str, ...], Test, str], ...] = (
    (("target_r", "tinit", "tfinal", "deltaT"), _whole, "it must be a whole number"),
    (("total_step",), lambda value: _whole(value) and value > 0, "AdaLoRA needs a whole number of steps from 1"),
    (("beta1", "beta2"), lambda value: _number(value) and 0 < value < 1, "it must be a number between 0 and 1"),
    (("rank_pattern",), _object, "it must map names to what was kept of their ranks"),
    (("orth_reg_weight",), lambda value: _number(value) and value >= 0, "it must be a number from 0"),
)


def check_adalora(config: Mapping[str, Any], refuse: Callable[[str, str], AdapterFormatError]) -> None:
    """How AdaLoRA trained, which peft asks before it loads. Raises as `check_types` does."""
    for fields, test, what in _ADALORA:
        for field in fields:
            if (field in config or field == "total_step") and not test(config.get(field)):
                raise refuse(field, what)
    if config.get("tinit", 0) >= config["total_step"] - config.get("tfinal", 0):
        raise refuse("total_step", "tinit and tfinal leave no step between them, and peft refuses that")


def check_types(config: Mapping[str, Any], refuse: Callable[[str, str], AdapterFormatError], *, in_model: bool) -> None:
    """Raises what `refuse` makes of a field and the reason."""
    for fields, test, what in (*_FIELDS, *(() if in_model else _FILES_ONLY)):
        for field in fields:
            if field in config and not test(config[field]):
                raise refuse(field, what)


def is_carried(field: str, value: Any) -> bool:
    """Whether a field is written on into a result: not the name of a module that peft would import, unless it is one of
    transformers'."""
    if field != "auto_mapping" or not isinstance(value, Mapping):
        return True
    return str(value.get("parent_library")).startswith("transformers.")
