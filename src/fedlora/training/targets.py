"""Which modules LoRA goes on, checked before anything heavy: the words alone, and then against a model without weights.

peft's rules: a list holds module paths or ends of them; a string is one regular expression that matches whole paths;
"all-linear" is every linear layer but the head.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from fedlora.errors import ConfigError
from fedlora.training.hub_models import source

Targets = Sequence[str] | str
ALL_LINEAR = "all-linear"


def check_words(targets: Targets) -> None:
    """Raises `ConfigError` for what is no list of names and no regular expression."""
    if isinstance(targets, str):
        try:
            re.compile(targets)
        except re.error as error:
            raise ConfigError(
                f"the string {targets!r} is one regular expression for whole module paths, and it is none: {error}. "
                f'Names stand in a list, as ["query", "value"]'
            ) from error
    if not targets or not all(targets):
        raise ConfigError('there must be at least one target, as ["query", "value"] or "all-linear", and none is empty')


def check_model(network: nn.Module, targets: Targets) -> None:
    """Raises `ConfigError` where a target is of no module of the model, or of one that is no linear layer."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(targets, str) and targets.lower() == ALL_LINEAR:
        return
    modules = {name: module for name, module in network.named_modules() if name}
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear | Conv1D)]
    ends = list(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    for target in [targets] if isinstance(targets, str) else targets:
        found = [name for name in modules if _is_meant(name, target, pattern=isinstance(targets, str))]
        if not found:
            raise ConfigError(
                f"lora.targets: {target!r} matches no module of the model. {_hint(targets, target, modules, ends)}"
            )
        odd = next((name for name in found if name not in linear), None)
        if odd is not None:
            raise ConfigError(
                f"lora.targets: {target!r} matches {odd!r}, a {type(modules[odd]).__name__}, and LoRA goes on linear "
                f"layers here. The model's are called {', '.join(ends)}."
            )


def check_targets(path: str | os.PathLike[str], task: str, targets: Targets) -> None:
    """`check_model` on the model at `path` before its weights are read: its configuration says which modules it has.

    Raises:
        ConfigError: a target that does not fit, or a model that cannot be found.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    if isinstance(targets, str) and targets.lower() == ALL_LINEAR:
        return
    kind: Any = AutoModelForSequenceClassification if task == "classification" else AutoModelForCausalLM
    where = source(path)
    try:
        config = AutoConfig.from_pretrained(path, **where)
        with torch.device("meta"):
            skeleton = kind.from_config(config)
    except (OSError, ValueError, RuntimeError):
        return  # `AdaptedModel.load` says what is wrong with such a model
    check_model(skeleton, targets)


def meant(paths: Sequence[str], targets: Targets) -> list[str]:
    """Which of the paths of linear layers are adapted; all of them for "all-linear"."""
    if isinstance(targets, str):
        every = targets.lower() == ALL_LINEAR
        return [path for path in paths if every or _is_meant(path, targets, pattern=True)]
    return [path for path in paths if any(_is_meant(path, target, pattern=False) for target in targets)]


def _is_meant(name: str, target: str, *, pattern: bool) -> bool:
    return bool(re.fullmatch(target, name)) if pattern else name == target or name.endswith(f".{target}")


def _hint(targets: Targets, target: str, modules: dict[str, nn.Module], ends: list[str]) -> str:
    if isinstance(targets, str):
        end = any(name.endswith(f".{target}") for name in modules)
        asked = f' Did you mean ["{target}"]?' if end else ""
        first = next((name for name in modules if name.rpartition(".")[2] in ends), "")
        return f"A single string is a regular expression that must match a module's whole path, as {first!r}.{asked}"
    near = difflib.get_close_matches(target, [*ends, *modules], n=3)
    return (f"The nearest are {', '.join(near)}; its" if near else "Its") + f" linear layers end in {', '.join(ends)}."
