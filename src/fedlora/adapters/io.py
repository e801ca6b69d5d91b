"""The PEFT boundary: directories and models on one side, `Adapter` on the other.

Only this package knows alpha and r, key names and patterns. Inside the library an update is W0 + scaling * B @ A with
one `scaling` for all modules and clients; this module folds each module's own alpha / r (or alpha / sqrt(r)), relative
to that scaling, into B. If they are equal, B stays the same bit for bit. A is never touched.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedlora.adapters.config import check_config
from fedlora.adapters.reader import PREFIX, AdapterFile, check_scaling, scaled
from fedlora.adapters.writer import AdapterSpec, spec_of, write_adapter
from fedlora.core.lora import Adapter, LoRA
from fedlora.errors import AdapterFormatError, ConfigError, ShapeError
from fedlora.linalg.own_modes import own_modes


def read_adapter(directory: str | os.PathLike[str], *, scaling: float = 1.0) -> tuple[Adapter, AdapterSpec]:
    """A PEFT LoRA directory as an `Adapter` in units of `scaling`, and its spec.

    Args:
        directory: holds adapter_config.json and adapter_model.safetensors.
        scaling: with the default 1.0, B @ A is the update itself. Pass a run's common alpha / r to get the stored
            factors back bit for bit.

    Raises:
        AdapterFormatError: missing, damaged or pickled files; a feature that is not W0 + s B A; keys or shapes that
            do not fit the config.

    Example:
        >>> adapter, spec = read_adapter("adapter", scaling=2.0)  # a PEFT directory of alpha = 2 r
        >>> adapter.ranks
        {'q': 4, 'v': 4}
    """
    file = AdapterFile(directory, scaling=scaling)
    modules = {name: file.lora(name) for name in file.modules}
    return Adapter(modules, {path: file.head(path) for path in file.heads}), spec_of(file.config, scaling)


# ----------------------------------------------------------------------------------------------------------- models

# Attribute of a peft model: how its base weights have moved, and the pre-trained weights of those that ever did.
_BASE = "_fedlora_base"
_UNMOVED: tuple[Mapping[str, LoRA] | None, Mapping[str, nn.Parameter]] = (None, {})


def read_model(model: nn.Module, name: str = "default", *, scaling: float = 1.0) -> tuple[Adapter, AdapterSpec]:
    """The adapter `name` of a peft model, as copies in units of `scaling`, and its spec. Its `base` is the one that
    `load_into_model` installed last, under any name.

    Raises:
        AdapterFormatError: no such adapter, or one that is not W0 + s B A.
    """
    check_scaling(scaling)
    config = _model_config(model, name)
    modules = {}
    for path, layer in _lora_layers(model, name):
        lora = _pair(path, layer.lora_B[name].weight.detach(), layer.lora_A[name].weight.detach())
        modules[path] = scaled(lora, layer.scaling[name] / scaling).map(Tensor.clone)
    heads = {path: tensor.detach().clone() for path, tensor in head_tensors(model, name)}
    return Adapter(modules, heads, getattr(model, _BASE, _UNMOVED)[0]), spec_of(config, scaling)


def load_into_model(model: nn.Module, adapter: Adapter, name: str = "default", *, scaling: float = 1.0) -> None:
    """Set a peft model to W0 + scaling * base, adapted by `adapter` under `name`: in place, all or nothing.

    Copies the factors and heads. A moved base weight becomes a new parameter of its layer alone: the pre-trained ones
    are never written to, because other processes or tied layers (an output tied to the embedding) may share them. They
    return with the next adapter whose `base` leaves them unchanged.

    Raises:
        AdapterFormatError: modules, heads or shapes differ, or the model's adapter is not W0 + s B A.
        ConfigError: a moved base weight is quantised in this model.
    """
    check_scaling(scaling)
    _model_config(model, name)
    layers, heads = dict(_lora_layers(model, name)), dict(head_tensors(model, name))
    for what, have, want in (("modules", layers, adapter.modules), ("heads", heads, adapter.heads)):
        if set(have) != set(want):
            odd = sorted(set(have) ^ set(want))
            raise AdapterFormatError(f"adapter and model differ in {what}: {odd[:3]} ({len(odd)} in all).")
    copies: list[tuple[str, Tensor, Tensor]] = []
    for path, lora in adapter.modules.items():
        layer = layers[path]
        B, A = scaled(lora, scaling / layer.scaling[name]).factors
        copies += [(path, layer.lora_B[name].weight, B), (path, layer.lora_A[name].weight, A)]
    copies += [(path, heads[path], head) for path, head in adapter.heads.items()]
    for path, target, value in copies:
        if target.shape != value.shape:
            raise AdapterFormatError(
                f"{path}: the model has shape {tuple(target.shape)}, but the adapter has {tuple(value.shape)}."
            )
    unmoved = dict(getattr(model, _BASE, _UNMOVED)[1])
    base = adapter.base or {}
    unmoved |= {path: _lora_layer(model, path).base_layer.weight for path in base if path not in unmoved}
    moved = {path: _moved(model, path, unmoved[path], lora, scaling) for path, lora in base.items()}
    with torch.no_grad():
        for _, target, value in copies:
            target.copy_(value)
    for path, weight in unmoved.items():
        _lora_layer(model, path).base_layer.weight = moved.get(path, weight)
    setattr(model, _BASE, (adapter.base, unmoved))


def _lora_layer(model: nn.Module, path: str) -> Any:
    try:
        return model.get_submodule(f"{PREFIX}{path}")
    except AttributeError as error:
        raise AdapterFormatError(f"{path}: its base weight has changed, but the model has no such module.") from error


@own_modes()
def _moved(model: nn.Module, path: str, weight: nn.Parameter, change: LoRA, scaling: float) -> nn.Parameter:
    """The pre-trained weight plus scaling * change."""
    if not weight.is_floating_point():
        raise ConfigError(
            f"the base weight of {path!r} is quantised ({weight.dtype}), so no update can be added to it: fedex-lora "
            f"and flora cannot run on it. Use another method, or a 16-bit base."
        )
    dense = scaling * change.map(lambda t: t.to(weight.device)).delta()
    dense = dense.T if _lora_layer(model, path).fan_in_fan_out else dense
    if dense.shape != weight.shape:
        raise AdapterFormatError(
            f"{path}: the base weight has shape {tuple(weight.shape)}, but its change has shape {tuple(dense.shape)}."
        )
    return nn.Parameter(weight.detach() + dense.to(weight.dtype), requires_grad=False)


def _lora_layers(model: nn.Module, name: str) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        if name in getattr(module, "lora_embedding_A", {}):
            raise AdapterFormatError(f"{path}: LoRA on an embedding is not supported yet; target linear layers.")
        if name in getattr(module, "lora_A", {}):
            yield path.removeprefix(PREFIX), module


def head_tensors(model: nn.Module, name: str) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers of fully trained modules, as peft saves them."""
    for path, module in model.named_modules():
        saved = getattr(module, "modules_to_save", None)
        if isinstance(saved, nn.ModuleDict) and name in saved:
            for key, tensor in saved[name].state_dict(keep_vars=True).items():
                yield f"{path.removeprefix(PREFIX)}.{key}", tensor


def _model_config(model: Any, name: str) -> dict[str, Any]:
    configs = getattr(model, "peft_config", {})
    if name not in configs:
        raise AdapterFormatError(f"the model has no adapter {name!r}; it has {sorted(configs) or 'none'}.")
    config = {key: _plain(value) for key, value in configs[name].to_dict().items()}
    try:
        check_config(config)
    except AdapterFormatError as error:
        raise AdapterFormatError(f"adapter {name!r} of the model: {error}") from error
    return config


def _pair(name: str, B: Tensor, A: Tensor) -> LoRA:
    try:
        return LoRA(B, A)
    except ShapeError as error:
        raise AdapterFormatError(f"module {name!r} is not a LoRA of a linear layer: {error}") from error


def _plain(value: Any) -> Any:
    """A config value as JSON represents it: sets sorted, enums by value, nested configs as dicts."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    return getattr(value, "value", value)


__all__ = ["AdapterSpec", "head_tensors", "load_into_model", "read_adapter", "read_model", "write_adapter"]
