"""Which modules get LoRA, checked before any heavy work. peft decides what a target means.

peft's rules: a list holds module paths or their ends; a string is one regular expression that matches whole paths;
"all-linear" is every linear layer except the head. peft ignores a target that matches nothing if another matches; we
refuse it.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

from torch import nn

from fedlora.errors import ConfigError, counted
from fedlora.training.settings import LoRASettings, Targets


def targeted(network: nn.Module, settings: LoRASettings, *, plain: bool) -> list[str] | str:
    """`LoraConfig.target_modules` for a network.

    plain: a module without transformers' knowledge of its head: "all-linear" is then each linear layer outside of the
    saved modules, and of nn.MultiheadAttention, whose code reads weights itself and would bypass LoRA.

    Raises:
        ConfigError: a target or a saved module does not fit.
    """
    layers, targets = dict(network.named_modules()), settings.targets
    heads = []
    for name in settings.saved:
        found = [path for path in layers if f".{path}".endswith(f".{name}")]
        if not found:
            raise ConfigError(
                f"lora.saved: {name!r} is not a module of the model, so nothing would be trained in full by that name. "
                f"Its modules begin with {', '.join(list(layers)[1:8])}, ..."
            )
        heads += found
    chosen, every = adapted(network, targets), _is_all_linear(targets)
    inside = [path for path in chosen if any(f"{path}.".startswith(f"{head}.") for head in heads)]
    if inside and not every:
        raise ConfigError(f"{inside[0]!r} is in lora.targets and in lora.saved: LoRA, or trained in full, not both.")
    if not plain or not every:
        return targets
    return [
        path for path in chosen
        if path not in inside and not isinstance(layers[path.rpartition(".")[0]], nn.MultiheadAttention)
    ]  # fmt: skip


def adapted(network: nn.Module, targets: Targets) -> list[str]:
    """The paths of the layers that peft adapts, in network order; for "all-linear" every linear layer.

    Raises:
        ConfigError: a target matches no module of the network, or one that is not a linear layer.
    """
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists
    from transformers.pytorch_utils import Conv1D

    modules = {name: module for name, module in network.named_modules() if name}
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear | Conv1D)]
    if _is_all_linear(targets):
        return linear
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


def in_words(modules: Collection[str]) -> str:
    """The ends of modules' paths, and how many modules they are: "query, value (12 modules)"."""
    return f"{', '.join(sorted(_ends(modules)))} ({counted(len(modules), 'module')})"


def _is_all_linear(targets: Targets) -> bool:
    return isinstance(targets, str) and targets.lower() == "all-linear"


def _ends(paths: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(path.rpartition(".")[2] for path in paths))


def _hint(targets: Targets, target: str, modules: Collection[str], linear: list[str]) -> str:
    ends = _ends(linear)
    if isinstance(targets, str):
        end = any(name.endswith(f".{target}") for name in modules)
        asked = f' Did you mean ["{target}"]?' if end else ""
        first = next((name for name in modules if name.rpartition(".")[2] in ends), "")
        return f"A single string is a regular expression that must match a module's whole path, as {first!r}.{asked}"
    near = difflib.get_close_matches(target, [*ends, *modules], n=3)
    return (f"The nearest are {', '.join(near)}; its" if near else "Its") + f" linear layers end in {', '.join(ends)}."


__all__ = ["adapted", "in_words", "targeted"]
