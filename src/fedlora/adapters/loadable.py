"""What peft 0.21 refuses to load since two things do not go together: fields of a config, or a config and its tensors.

A file that no peft loads is damaged or made up, and what it means nobody can say; and a result that carries such fields
on would not load either. Each rule names where peft has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from fedlora.adapters.embedding_names import may_be_embedding
from fedlora.adapters.resolved import CLASSIFIERS, saved_modules, ties_saved
from fedlora.core.echo import quoted
from fedlora.errors import AdapterFormatError

Refuse = Callable[[str, str], AdapterFormatError]
# peft makes a config of each that is there, {} as well, and what they switch on is not supported here.
_SWITCHED_ON = ("velora_config", "kasa_config", "arrow_config", "use_bdlora", "monteclora_config")


def check_fields(config: Mapping[str, Any], refuse: Refuse) -> None:
    """Fields of a config against each other (`__post_init__` of LoraConfig, EvaConfig, AdaLoraConfig; ParamWrapper)."""
    for field in _SWITCHED_ON:
        if config.get(field) is not None:
            raise refuse(field, "peft switches it on, whatever is in it")
    init = config.get("init_lora_weights", True)
    if config.get("lora_bias") and not isinstance(init, bool):
        raise refuse("lora_bias", f"peft takes it with init_lora_weights true or false only, not {quoted(init)}")
    if config.get("target_parameters"):
        for field in ("lora_bias", "fan_in_fan_out"):
            if config.get(field):
                raise refuse(field, "peft takes none beside target_parameters")
    eva = config.get("eva_config")
    eva = eva if isinstance(eva, Mapping) else {}
    if not _within(eva.get("rho", 2.0), 1.0, math.inf) or not _within(eva.get("tau", 0.99), 0.0, 1.0):
        raise refuse("eva_config", "peft takes a rho from 1 and a tau from 0 to 1")
    tokens = config.get("trainable_token_indices")
    if tokens is not None:
        saved = set(config.get("modules_to_save") or ())
        twice = saved & set(tokens if isinstance(tokens, Mapping) else ("embed_tokens",))
        if twice:
            raise refuse("trainable_token_indices", f"modules_to_save names {quoted(min(twice))} too: peft takes one")
    if config.get("peft_type") == "ADALORA":
        _check_adalora(config, refuse)


def _check_adalora(config: Mapping[str, Any], refuse: Refuse) -> None:
    total, first, last = (config.get(f, d) for f, d in (("total_step", None), ("tinit", 0), ("tfinal", 0)))
    if not _within(total, 0, math.inf) or total == 0:
        raise refuse("total_step", "AdaLoRA needs the number of its steps, and peft loads none without")
    if not _within(first, -math.inf, math.inf) or not _within(last, -math.inf, math.inf) or first >= total - last:
        raise refuse("tinit", f"with tfinal = {quoted(last)} and total_step = {quoted(total)}, none is left between")
    if not _within(config.get("orth_reg_weight", 0.5), 0, math.inf):
        raise refuse("orth_reg_weight", "it must be a number from 0")
    if config.get("lora_bias"):
        raise refuse("lora_bias", "AdaLoRA has none: peft would leave the biases out")
    masks = config.get("rank_pattern")
    if masks is not None and not (
        isinstance(masks, Mapping)
        and all(isinstance(mask, list | tuple) and all(isinstance(x, bool) for x in mask) for mask in masks.values())
    ):
        raise refuse("rank_pattern", "AdaLoRA's maps names to lists of true and false")


def _within(value: Any, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


# ------------------------------------------------------------------------------------------------ config and tensors


def check_layers(config: Mapping[str, Any], kinds: Mapping[str, str], ranks: Mapping[str, int]) -> None:
    """What peft does when it makes a layer, before it reads the numbers. kinds, ranks: of the layer at each path."""
    init = config.get("init_lora_weights", True)
    for path, kind in kinds.items():
        if kind == "embedding" and config.get("lora_bias"):
            raise AdapterFormatError(f"{quoted(path)} is an embedding, for which peft takes no lora_bias.")
        if kind == "conv" and init in ("eva", "orthogonal"):
            raise AdapterFormatError(
                f"{quoted(path)} is a convolution, which peft cannot begin with init_lora_weights = {init!r}."
            )
        if init == "orthogonal" and kind in ("linear", "parameter") and ranks[path] % 2:
            raise AdapterFormatError(
                f"{quoted(path)} has rank {ranks[path]}; peft takes even ranks only with init_lora_weights = "
                f"'orthogonal'."
            )


def adalora_ranks(config: Mapping[str, Any], names: Collection[str]) -> dict[str, int]:
    """Name of a module -> the rank of its pair, by AdaLoRA's masks; init_r where it has none
    (`AdaLoraModel.resize_modules_by_rank_pattern`).

    Raises:
        AdapterFormatError: a mask of another length, or of a module that is not there.
    """
    start: int = config["init_r"]
    found = dict.fromkeys(names, start)
    for key, mask in (config.get("rank_pattern") or {}).items():
        plain = key.replace(".default", "")
        parts = plain.split(".")
        name = ".".join(parts[: -2 if "default" in plain else -1])
        if name not in found:
            raise AdapterFormatError(f"rank_pattern has {quoted(key)}, and the file no factors of {quoted(name)}.")
        if len(mask) != start:
            raise AdapterFormatError(
                f"rank_pattern has {len(mask)} values for {quoted(key)}, and the rank began with init_r = {start}."
            )
        found[name] = sum(mask)
    return found


def check_parameters(targets: Mapping[str, Collection[str]]) -> None:
    """A layer is adapted, or a parameter of it. targets: name of a targeted layer -> its parameters that
    target_parameters names (`BaseTuner._inject_parameters`)."""
    for module, parameters in targets.items():
        if {"weight", "bias"} & set(parameters):
            raise AdapterFormatError(
                f"target_modules means {quoted(module)}, and target_parameters one of its parameters: peft takes one."
            )


def check_saved(config: Mapping[str, Any], heads: Mapping[str, str]) -> None:
    """Every module that modules_to_save names has tensors: peft asks the file for each.

    Args:
        heads: path of a tensor beside the pairs -> its kind (`config.extra_kind`).
    """
    given = [path for path, kind in heads.items() if kind == "head"]
    names: list[str] = list(config.get("modules_to_save") or ())
    lacking = [name for name in names if not any(f"{name}." in path for path in given)]
    for path in given:  # the wrapper of the outer one has no such child
        around = saved_modules(path, names)
        if any(module.count(".") != around[0].count(".") + 2 for module in around[1:]):
            raise AdapterFormatError(
                f"modules_to_save means {quoted(around[0])} and {quoted(around[1])} in it: peft loads no saved module "
                f"within another. Name the outer one."
            )
    some_classifier = any(name in CLASSIFIERS and name not in lacking for name in names)
    for name in lacking:
        if name in CLASSIFIERS and some_classifier:  # peft names both, and a model has one
            continue
        if ties_saved(config) and given and may_be_embedding(name):  # one copy is stored for all that are tied
            continue
        raise AdapterFormatError(f"modules_to_save names {quoted(name)}, and the file has no tensor of it.")


def check_tokens(config: Mapping[str, Any], rows: Mapping[str, tuple[int, ...]]) -> None:
    """trainable_token_indices against the rows that the file has.

    Args:
        rows: path of a module whose tokens were trained -> the shape of its tensor.
    """
    said = config.get("trainable_token_indices")
    if said is None:
        return
    if not isinstance(said, Mapping):
        if not rows:
            raise AdapterFormatError("trainable_token_indices names tokens, and the file has no rows of them.")
        wanted = dict.fromkeys(rows, said)
    else:
        wanted = {path: said[name] for path in rows for name in said if path == name or path.endswith(f".{name}")}
        stored = [indices for path, indices in wanted.items()]
        for name, indices in said.items():
            there = any(path == name or path.endswith(f".{name}") for path in rows)
            if not there and indices not in stored:  # of tied layers with the same tokens, one is stored
                raise AdapterFormatError(
                    f"trainable_token_indices names {quoted(name)}, and the file has no rows of it."
                )
    for path, shape in rows.items():
        if path not in wanted:
            raise AdapterFormatError(
                f"the file has rows of {quoted(path)}, which trainable_token_indices does not name."
            )
        if len(shape) != 2 or shape[0] != len(wanted[path]):
            raise AdapterFormatError(
                f"the rows of {quoted(path)} have shape {shape}; trainable_token_indices names {len(wanted[path])}."
            )
