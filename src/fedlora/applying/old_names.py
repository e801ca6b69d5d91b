"""Translates an adapter trained under transformers 4 to the module names of transformers 5.

peft converts such an adapter on loading. We run that conversion on empty tensors: those that come out unchanged have
only been renamed. Experts, which peft also joins into one tensor, are refused, and the message says what to do.
"""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig
from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers

from fedlora.adapters.config_fields import is_adalora
from fedlora.adapters.module_names import plain
from fedlora.adapters.reader import PREFIX, AdapterFile
from fedlora.core.text import quoted
from fedlora.errors import AdapterFormatError


def by_new_names(file: AdapterFile, model: Any) -> AdapterFile | None:
    """The adapter under the names peft uses with `model`; None if peft maps none of its names to the model's.

    Raises:
        AdapterFormatError: peft would also change tensors.
    """
    if is_adalora(file.config):
        return None
    given = {key: torch.empty(stored.shape, device="meta") for key, stored in file.stored.items()}
    try:
        made = convert_peft_adapter_state_dict_for_transformers(model, LoraConfig(r=file.config["r"]), dict(given))
    except Exception:  # conversion steps may fail in any way on foreign tensors; peft would not load them either
        return None
    new, modules = sorted(made.keys() - given), {name for name, _ in model.named_modules()}
    if not new or not all(plain(key.removeprefix(PREFIX).partition(".lora_")[0]) in modules for key in new):
        return None
    old = {id(tensor): key for key, tensor in given.items()}
    names = {old[id(tensor)]: key for key, tensor in made.items() if id(tensor) in old}
    if len(names) < len(given):
        lost = sorted(given.keys() - names)[0]
        raise AdapterFormatError(
            f"{quoted(lost.removeprefix(PREFIX))} is a name from transformers 4, and peft joins several such tensors "
            f"on loading, into {quoted(new[0].removeprefix(PREFIX))}. Load the adapter with peft on this base model, "
            f"save it again, and use that"
        )
    return AdapterFile(
        file.directory, scaling=file.scaling, limits=file.limits, allow_unknown=file.config, with_base=True,
        dora=bool(file.config.get("use_dora")), names=names,
    )  # fmt: skip
