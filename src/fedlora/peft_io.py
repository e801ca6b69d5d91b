"""The PEFT boundary: directories and models on one side, `Adapter` on the other.

The only place that knows alpha and r, key names and patterns. Inside the library an update is W0 + scaling * B @ A with
one `scaling` for all modules and clients; here each module's own alpha / r (or alpha / sqrt(r)) is folded into B
relative to it, so a common one is the identity, bit for bit. A is never touched.

Reads the files itself (torch and safetensors only) and refuses by name what would change the update: see
docs/decisions/0006-peft-boundary.md for the table.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from fedlora.adapter_file import CONFIG_FILE, PREFIX, WEIGHTS_FILE, AdapterFile, scaled
from fedlora.errors import AdapterFormatError, ShapeError
from fedlora.layouts import Layout, stored_path
from fedlora.lora import Adapter, LoRA
from fedlora.peft_config import (
    ADALORA_FIELDS,
    alpha_for,
    check_config,
    check_scaling,
    extras_for,
    is_adalora,
    saved_modules_for,
    targets_for,
)


@dataclass(frozen=True)
class AdapterSpec:
    """What a PEFT adapter says besides its numbers. Opaque to the core; `write_adapter` puts it back.

    config: the fields of adapter_config.json, without rank and alpha, which follow from the adapter.
    scaling: the update is scaling * B @ A for the adapter that this spec came with. layouts: path -> how the pair is
    stored, of those that are no linear layers.
    """

    config: Mapping[str, Any]
    scaling: float = 1.0
    layouts: Mapping[str, Layout] = field(default_factory=dict)

    @property
    def base_model(self) -> str | None:
        name: str | None = self.config.get("base_model_name_or_path")
        return name


# ------------------------------------------------------------------------------------------------------ directories


def read_adapter(directory: str | os.PathLike[str], *, scaling: float = 1.0) -> tuple[Adapter, AdapterSpec]:
    """A PEFT LoRA directory as an `Adapter` in units of `scaling`, and its spec.

    Args:
        directory: holds adapter_config.json and adapter_model.safetensors.
        scaling: with the default 1.0, B @ A is the update itself. Pass a run's common alpha / r to get the stored
            factors back bit for bit.

    Raises:
        AdapterFormatError: missing, damaged or pickled files; a feature that is not W0 + s B A; keys or shapes that
            do not fit the config.
    """
    file = AdapterFile(directory, scaling=scaling)
    modules = {name: file.lora(name) for name in file.modules}
    heads = {path: file.head(path) for path in file.heads}
    return Adapter(modules, heads), spec_of(file.config, scaling, file.layouts)


def write_adapter(directory: str | os.PathLike[str], adapter: Adapter, spec: AdapterSpec, *, card: str = "") -> None:
    """A PEFT directory that `PeftModel.from_pretrained` loads as base + spec.scaling * B @ A, rank by rank.

    Modules of different ranks become rank_pattern and alpha_pattern. `card` is the text of README.md. Each file is
    written beside and renamed, so a reader never sees half of one.

    Raises:
        AdapterFormatError: a factor is missing, or values are not finite.
    """
    check_scaling(spec.scaling)
    directory = Path(directory)
    if not adapter.modules:
        raise AdapterFormatError(f"the adapter has no modules; nothing was written to {directory}.")
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for path, pairs in _by_path(adapter, spec).items():
        layout = spec.layouts.get(path, Layout())
        ranks[path] = max(pair.rank for pair in pairs)
        if min(pair.rank for pair in pairs) == 0:
            raise AdapterFormatError(f"module {path!r} has rank 0, which PEFT cannot hold; pad it with `pad_rank`.")
        key_B, key_A = layout.keys(path)
        tensors[PREFIX + key_B], tensors[PREFIX + key_A] = layout.packed([pad_rank(p, ranks[path]) for p in pairs])
    tensors |= {f"{PREFIX}{name}": head for name, head in adapter.heads.items()}
    for key, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise AdapterFormatError(f"{key} holds NaN or Inf; nothing was written to {directory}.")

    common = Counter(ranks.values()).most_common(1)[0][0]
    other = {f"^{re.escape(_pattern(path, spec))}": r for path, r in ranks.items() if r != common}
    config = {
        **spec.config,
        **targets_for(spec.config, adapter, spec.layouts),
        **saved_modules_for(spec.config, adapter),
        "peft_type": "LORA",
        "r": common,
        "lora_alpha": alpha_for(spec.scaling, common),
        "rank_pattern": other,
        "alpha_pattern": {key: alpha_for(spec.scaling, r) for key, r in other.items()},
        "use_rslora": False,
        "init_lora_weights": True,
        **extras_for(spec.config, adapter),
        "inference_mode": True,
    }
    stored = _unshared({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()})
    directory.mkdir(parents=True, exist_ok=True)
    _replace(directory / WEIGHTS_FILE, safetensors.torch.save(stored, metadata={"format": "pt"}))
    _replace(directory / "README.md", (card or _plain_card(spec)).encode())
    _replace(directory / CONFIG_FILE, (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())


def _by_path(adapter: Adapter, spec: AdapterSpec) -> dict[str, list[LoRA]]:
    """The pairs that are stored together: several only for the experts of a parameter, in their order."""
    found: dict[str, list[LoRA]] = {}
    for name in adapter.modules:
        path = name if name in spec.layouts or stored_path(name) not in spec.layouts else stored_path(name)
        if path not in found:
            names = spec.layouts.get(path, Layout()).modules(path)
            lacking = [module for module in names if module not in adapter.modules]
            if lacking:
                raise AdapterFormatError(f"the adapter lacks {lacking[0]!r}, which is stored with {name!r}.")
            found[path] = [adapter.modules[module] for module in names]
    return found


def _pattern(path: str, spec: AdapterSpec) -> str:
    layout = spec.layouts.get(path)
    return layout.pattern if layout is not None and layout.pattern else path


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of those that share memory with one before, which safetensors does not store."""
    seen: set[int] = set()
    own = {}
    for key, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        own[key] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return own


def pad_rank(lora: LoRA, rank: int) -> LoRA:
    """The same update with zero slots up to `rank`: for export only, since such slots cannot train."""
    B, A = lora.factors
    grow = max(rank - lora.rank, 0)
    return LoRA(nn.functional.pad(B, (0, grow)), nn.functional.pad(A, (0, 0, 0, grow)))


# ----------------------------------------------------------------------------------------------------------- models


def read_model(model: nn.Module, name: str = "default", *, scaling: float = 1.0) -> tuple[Adapter, AdapterSpec]:
    """The adapter `name` of a peft model, as copies in units of `scaling`, and its spec.

    Raises:
        AdapterFormatError: no such adapter, or one that is not W0 + s B A.
    """
    check_scaling(scaling)
    config = _model_config(model, name)
    modules = {}
    for path, layer in _lora_layers(model, name):
        lora = _pair(path, layer.lora_B[name].weight.detach(), layer.lora_A[name].weight.detach())
        modules[path] = scaled(lora, layer.scaling[name] / scaling).map(Tensor.clone)
    heads = {path: tensor.detach().clone() for path, tensor in _head_tensors(model, name)}
    return Adapter(modules, heads), spec_of(config, scaling)


def load_into_model(model: nn.Module, adapter: Adapter, name: str = "default", *, scaling: float = 1.0) -> None:
    """Copy `adapter`, in units of `scaling`, into the adapter `name` of a peft model, in place, all or nothing.

    Raises:
        AdapterFormatError: modules, heads or shapes of the two differ, or the model's adapter is not W0 + s B A.
    """
    check_scaling(scaling)
    _model_config(model, name)
    layers, heads = dict(_lora_layers(model, name)), dict(_head_tensors(model, name))
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
                f"{path}: the model has shape {tuple(target.shape)}, the adapter {tuple(value.shape)}."
            )
    with torch.no_grad():
        for _, target, value in copies:
            target.copy_(value)


def _lora_layers(model: nn.Module, name: str) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        if name in getattr(module, "lora_embedding_A", {}):
            raise AdapterFormatError(f"{path}: LoRA on an embedding is not supported yet; target linear layers.")
        if name in getattr(module, "lora_A", {}):
            yield path.removeprefix(PREFIX), module


def _head_tensors(model: nn.Module, name: str) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers of the fully trained modules, as peft saves them."""
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
    check_config(config, where=f"adapter {name!r} of the model", in_model=True)
    return config


def _pair(name: str, B: Tensor, A: Tensor) -> LoRA:
    try:
        return LoRA(B, A)
    except ShapeError as error:
        raise AdapterFormatError(f"module {name!r} is no LoRA of a linear layer: {error}") from error


def spec_of(config: Mapping[str, Any], scaling: float, layouts: Mapping[str, Layout] | None = None) -> AdapterSpec:
    """What a config says besides ranks and scaling, which follow from the adapter. AdaLoRA's becomes LoRA's."""
    gone = {"r", "lora_alpha", "rank_pattern", "alpha_pattern", *(ADALORA_FIELDS if is_adalora(config) else ())}
    kept = {k: v for k, v in sorted(config.items()) if k not in gone}
    for name in ("target_modules", "exclude_modules"):  # sets in memory: any order on disk
        if isinstance(kept.get(name), list):
            kept[name] = sorted(kept[name])
    special = {path: layout for path, layout in (layouts or {}).items() if layout.kind not in ("linear", "adalora")}
    return AdapterSpec(MappingProxyType(kept), scaling, MappingProxyType(special))


def _plain(value: Any) -> Any:
    """A config value as JSON has it: sets sorted, enums by value, nested configs as dicts."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    return getattr(value, "value", value)


# ------------------------------------------------------------------------------------------------------------ files


def _replace(path: Path, content: bytes) -> None:
    beside = path.with_name(path.name + ".part")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def _plain_card(spec: AdapterSpec) -> str:
    base = f"base_model: {spec.base_model}\n" if spec.base_model else ""
    return f"---\nlibrary_name: peft\n{base}tags:\n- lora\n- fedlora\n---\n\nA LoRA adapter written by fedlora.\n"
