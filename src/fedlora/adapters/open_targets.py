"""Modules of which the config leaves to the base model whether peft targets them.

Three configs do: target_modules = null (peft takes what its table says for the model's type), "all-linear" (every
linear layer but the output's), and ensure_weight_tying (also what is tied to a targeted embedding). peft itself saves
names instead of the first two, so a file that has them was written by hand. With the base model there, all is asked.
Without it, what the file alone tells is: null is refused, all-linear means nothing but linear layers without a head. Of
the rest a reader is told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fedlora.adapters import default_targets
from fedlora.adapters.architecture import Architecture, Tie
from fedlora.adapters.config_meaning import _OUTPUTS, ALL_LINEAR, left_to_the_base
from fedlora.adapters.config_meaning import left_out as _left_out
from fedlora.adapters.default_targets import is_default_target


def check_with_base(
    config: Mapping[str, Any],
    modules: Mapping[str, str],
    base: Mapping[str, Any],
    architecture: Architecture,
    tie_of: Callable[[str], Tie | None],
) -> None:
    """Raises `AdapterFormatError` where peft does not target one of the modules on this base model, or where that
    cannot be told.

    Args:
        modules: name of each module that the config leaves to the base model -> the weight that its pair changes.
        base: the base model's config.json.
    """
    said = left_to_the_base(config)
    kind = base.get("model_type")
    ends = _table(config).get(kind) if isinstance(kind, str) else None
    for name, weight in modules.items():
        if said is None:
            if tie_of(weight) is None:
                raise _left_out(name, "the config does not target it, and the base model ties it with nothing")
        elif said == ALL_LINEAR:
            _check_linear(name, weight, architecture)
        elif ends is None:
            raise _left_out(name, f"target_modules is null, and for {architecture} peft knows no targets")
        elif not is_default_target(name, ends):
            raise _left_out(name, f"target_modules is null, and for {architecture} peft takes {ends}")


def _check_linear(name: str, weight: str, architecture: Architecture) -> None:
    """Whether all-linear means a layer."""
    leaf = name.rpartition(".")[2]
    is_output = weight in architecture.targets or leaf in _OUTPUTS
    if is_output or not weight.endswith(".weight") or architecture.is_embedding(leaf):
        raise _left_out(name, "all-linear means linear layers, without the output's")
    if not architecture.is_known:
        raise _left_out(name, f"the config says all-linear, and which layers of {architecture} are linear is not known")


def _table(config: Mapping[str, Any]) -> Mapping[str, str]:
    return default_targets.ADALORA if config.get("peft_type") == "ADALORA" else default_targets.LORA
