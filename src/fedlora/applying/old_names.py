"""An adapter that was trained under transformers 4, by the names that its modules have in transformers 5.

peft converts such an adapter as it loads, and is asked here, with empty tensors: what comes out of it as it went in has
another name and nothing else. Experts, which it also puts together, are refused with the way round.
"""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig
from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers

from fedlora.adapters.config_fields import is_adalora
from fedlora.adapters.module_names import plain
from fedlora.adapters.reader import PREFIX, AdapterFile
from fedlora.core.echo import quoted
from fedlora.errors import AdapterFormatError


def by_new_names(file: AdapterFile, model: Any) -> AdapterFile | None:
    """The adapter as peft takes it beside `model`; None where it makes no names of the model's out of its own.

    Raises:
        AdapterFormatError: peft makes other tensors of it.
    """
    if is_adalora(file.config):
        return None
    given = {key: torch.empty(stored.shape, device="meta") for key, stored in file.stored.items()}
    try:
        made = convert_peft_adapter_state_dict_for_transformers(model, LoraConfig(r=file.config["r"]), dict(given))
    except Exception:  # whatever a model's steps make of tensors that are not its own: peft does not load them either
        return None
    new, modules = sorted(made.keys() - given), {name for name, _ in model.named_modules()}
    if not new or not all(plain(key.removeprefix(PREFIX).partition(".lora_")[0]) in modules for key in new):
        return None
    old = {id(tensor): key for key, tensor in given.items()}
    names = {old[id(tensor)]: key for key, tensor in made.items() if id(tensor) in old}
    if len(names) < len(given):
        lost = sorted(given.keys() - names)[0]
        raise AdapterFormatError(
            f"{quoted(lost.removeprefix(PREFIX))} is a name of transformers 4, and peft puts several such tensors "
            f"together as it loads them, to {quoted(new[0].removeprefix(PREFIX))}. Load the adapter with peft beside "
            f"this base model, save it again, and use that"
        )
    return AdapterFile(
        file.directory, scaling=file.scaling, limits=file.limits, allow_unknown=file.config, with_base=True, names=names
    )
