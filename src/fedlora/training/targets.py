"""Which modules get LoRA, checked before any heavy work. peft decides what a target means.

peft's rules: a list holds module paths or their ends; a string is one regular expression that matches whole paths;
"all-linear" is every linear layer except the head. peft ignores a target that matches nothing if another matches; we
refuse it.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

from fedlora.errors import ConfigError, counted
from fedlora.training.hub_models import source
from fedlora.training.settings import Targets

ALL_LINEAR = "all-linear"


def is_all_linear(targets: Targets) -> bool:
    return isinstance(targets, str) and targets.lower() == ALL_LINEAR


def linear_layers(network: nn.Module) -> list[str]:
    """The paths of all layers that can get LoRA."""
    from transformers.pytorch_utils import Conv1D

    return [name for name, module in network.named_modules() if name and isinstance(module, nn.Linear | Conv1D)]


def adapted(network: nn.Module, targets: Targets) -> list[str]:
    """The paths of the layers that peft adapts, in network order; for "all-linear" every linear layer.

    Raises:
        ConfigError: a target matches no module of the network, or one that is not a linear layer.
    """
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    linear = linear_layers(network)
    if is_all_linear(targets):
        return linear
    modules = {name: module for name, module in network.named_modules() if name}
    chosen: set[str] = set()
    for target in [targets] if isinstance(targets, str) else targets:
        asked = LoraConfig(target_modules=targets if isinstance(targets, str) else [target])
        found = [name for name in modules if check_target_module_exists(asked, name)]
        if not found:
            raise ConfigError(
                f"the target {target!r} (lora.targets of a run) matches no module of the model. "
                f"{_hint(targets, target, modules, linear)}"
            )
        odd = next((name for name in found if name not in linear), None)
        if odd is not None:
            raise ConfigError(
                f"the target {target!r} (lora.targets of a run) matches {odd!r}, a {type(modules[odd]).__name__}, and "
                f"fedlora trains LoRA only on linear layers. The model's are called {', '.join(_ends(linear))}."
            )
        chosen.update(found)
    return [name for name in linear if name in chosen]


def check_targets(path: str | os.PathLike[str], task: str, targets: Targets) -> None:
    """`adapted` for the model at `path` before its weights are read: its configuration gives its modules.

    Raises:
        ConfigError: a target does not fit, or the model cannot be found.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    if is_all_linear(targets):
        return
    kind: Any = AutoModelForSequenceClassification if task == "classification" else AutoModelForCausalLM
    where = source(path)
    try:
        config = AutoConfig.from_pretrained(path, **where)
        with torch.device("meta"):
            skeleton = kind.from_config(config)
    except Exception:
        return  # `loading.load_base` will explain what is wrong with the model
    adapted(skeleton, targets)


def in_words(modules: Collection[str]) -> str:
    """The ends of modules' paths, and how many modules they are: "query, value (12 modules)"."""
    return f"{', '.join(sorted(_ends(modules)))} ({counted(len(modules), 'module')})"


def _ends(paths: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(path.rpartition(".")[2] for path in paths))


def _hint(targets: Targets, target: str, modules: dict[str, nn.Module], linear: list[str]) -> str:
    ends = _ends(linear)
    if isinstance(targets, str):
        end = any(name.endswith(f".{target}") for name in modules)
        asked = f' Did you mean ["{target}"]?' if end else ""
        first = next((name for name in modules if name.rpartition(".")[2] in ends), "")
        return f"A single string is a regular expression that must match a module's whole path, as {first!r}.{asked}"
    near = difflib.get_close_matches(target, [*ends, *modules], n=3)
    return (f"The nearest are {', '.join(near)}; its" if near else "Its") + f" linear layers end in {', '.join(ends)}."


__all__ = ["adapted", "check_targets", "in_words", "is_all_linear", "linear_layers"]
