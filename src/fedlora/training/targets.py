"""Which modules get LoRA, checked before any heavy work. peft decides what a target means.

peft's rules: a list holds module paths or their ends; a string is one regular expression that matches whole paths;
"all-linear" is every linear layer except the head. peft ignores a target that matches nothing if another matches; we
refuse it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import nn

from fedlora.errors import ConfigError, counted
from fedlora.training.settings import LoRASettings, Targets


def targeted(network: nn.Module, settings: LoRASettings, *, plain: bool) -> list[str] | str:
    """`LoraConfig.target_modules` for a network.

    plain: a module without transformers' knowledge of its head: "all-linear" is then each linear layer outside of the
    saved modules.

    Raises:
        ConfigError: a target or a saved module does not fit.
    """
    layers, targets = dict(network.named_modules()), settings.target_modules
    heads = []
    for name in settings.modules_to_save:
        found = [path for path in layers if f".{path}".endswith(f".{name}")]
        if not found:
            raise ConfigError(
                f"lora.modules_to_save: {name!r} is not a module of the model, which begins with "
                f"{', '.join(list(layers)[1:8])}, ..."
            )
        heads += found
    chosen = adapted(network, targets)
    inside = [path for path in chosen if any(f"{path}.".startswith(f"{head}.") for head in heads)]
    if _is_all_linear(targets):
        return [path for path in chosen if path not in inside] if plain else targets
    if inside:
        raise ConfigError(
            f"{inside[0]!r} is in lora.target_modules and in lora.modules_to_save: LoRA, or trained in full, not both."
        )
    return targets


def adapted(network: nn.Module, targets: Targets) -> list[str]:
    """The paths of the layers that peft adapts, in network order; for "all-linear" every linear layer. Not those in
    nn.MultiheadAttention, whose code reads their weights itself and would bypass LoRA.

    Raises:
        ConfigError: a target matches no module of the network, or one that is not a linear layer.
    """
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists
    from transformers.pytorch_utils import Conv1D

    modules = {name: module for name, module in network.named_modules() if name}
    linear = [
        name for name, module in modules.items() if isinstance(module, nn.Linear | Conv1D)
        and not isinstance(modules.get(name.rpartition(".")[0], network), nn.MultiheadAttention)
    ]  # fmt: skip
    if _is_all_linear(targets):
        return linear
    chosen: set[str] = set()
    for target in [targets] if isinstance(targets, str) else targets:
        asked = LoraConfig(target_modules=target if isinstance(targets, str) else [target])
        found = [name for name in modules if check_target_module_exists(asked, name)]
        if not found:
            rule = " as a regular expression for whole paths" if isinstance(targets, str) else ""
            raise ConfigError(
                f"the target {target!r} (lora.target_modules) matches no module of the model{rule}. Its linear layers "
                f"end in {', '.join(_ends(linear))}; a whole path is {next(iter(linear), None)!r}."
            )
        odd = next((name for name in found if name not in linear), None)
        if odd is not None:
            raise ConfigError(
                f"the target {target!r} (lora.target_modules) matches {odd!r}, a {type(modules[odd]).__name__}: LoRA "
                f"is only on linear layers that are called, which end in {', '.join(_ends(linear))}."
            )
        chosen.update(found)
    return [name for name in linear if name in chosen]


def in_words(modules: Collection[str]) -> str:
    """The ends of modules' paths, and how many modules they are: "query, value (12 modules)"."""
    return f"{', '.join(sorted(_ends(modules)))} ({counted(len(modules), 'module')})"


def _is_all_linear(targets: Targets) -> bool:
    return isinstance(targets, str) and targets.lower() == "all-linear"


def _ends(paths: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(path.rpartition(".")[2] for path in paths))
