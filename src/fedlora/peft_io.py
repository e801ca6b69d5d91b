"""The PEFT boundary: directories and models on one side, `Adapter` on the other.

The only place that knows alpha and r, key names and patterns. Inside the library an update is W0 + scaling * B @ A with
one `scaling` for all modules and clients; here each module's own alpha / r (or alpha / sqrt(r)) is folded into B
relative to it, so a common one is the identity, bit for bit. A is never touched.

Reads the files itself (torch and safetensors only) and refuses by name what would change the update: see
docs/decisions/0006-peft-boundary.md for the table.
"""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from fedlora.errors import AdapterFormatError
from fedlora.lora import Adapter, LoRA

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."

# Fields of adapter_config.json (peft 0.21) that leave the update alone, whatever their value.
# fmt: off
_HARMLESS = frozenset((
    "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config", "exclude_modules",
    "inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout", "loftq_config", "megatron_core",
    "modules_to_save", "peft_version", "qalora_group_size", "revision", "target_modules", "task_type",
    "fan_in_fan_out", "runtime_config",
))
# Fields that we apply ourselves.
_APPLIED = frozenset((
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights", "bias",
))
# fmt: on
# Fields that change the update or what it is relative to, with the way out.
_REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA's magnitudes are not linear in the update; merge it into the base model first",
    "lora_bias": "it adds a bias to the update; train with lora_bias=False",
    "target_parameters": "LoRA on bare parameters is not supported yet; target modules instead",
    "trainable_token_indices": "token embeddings are trained beside the update; not supported yet",
    "layer_replication": "the base model is another one than its name says; merge it first",
    "use_qalora": "QALoRA pools the inputs of A; not an update B @ A",
    "use_bdlora": "block-diagonal LoRA is not supported yet",
    "alora_invocation_tokens": "aLoRA applies the update to part of the tokens only",
    "arrow_config": "Arrow routes between adapters",
    "kasa_config": "KaSA changes the base weights",
    "monteclora_config": "MonteCLoRA samples its update",
    "velora_config": "VeLoRA changes how the update is computed",
    "corda_config": "CorDA changes the base weights; convert with peft's path_initial_model_for_weight_conversion",
    "lora_ga_config": "LoRA-GA changes the base weights; convert with peft's path_initial_model_for_weight_conversion",
    "megatron_config": "tensor-parallel layers are not supported",
}
# Initialisations that only choose where A and B start. Others (PiSSA, OLoRA, ...) change the base weights too.
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class AdapterSpec:
    """What a PEFT adapter says besides its numbers. Opaque to the core; `write_adapter` puts it back.

    config: the fields of adapter_config.json, without rank and alpha, which follow from the adapter.
    scaling: the update is scaling * B @ A for the adapter that this spec came with.
    """

    config: Mapping[str, Any]
    scaling: float = 1.0

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
    directory = Path(directory)
    config = _read_config(directory)
    check_config(config, where=str(directory / CONFIG_FILE))
    tensors = _read_weights(directory)

    pairs: dict[str, dict[str, Tensor]] = {}
    heads: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if not key.startswith(PREFIX):
            raise AdapterFormatError(f"{directory}: key {key!r} does not start with {PREFIX!r}: not a PEFT LoRA file.")
        path = key.removeprefix(PREFIX)
        found = re.fullmatch(r"(.+)\.lora_([AB])\.weight", path)
        if found:
            pairs.setdefault(found[1], {})[found[2]] = tensor
        elif _is_head(path, config):
            heads[path] = tensor
        else:
            raise AdapterFormatError(
                f"{directory}: key {key!r} is neither a LoRA factor of a linear layer nor one of modules_to_save "
                f"{config.get('modules_to_save') or []}. Embedding, convolution and magnitude tensors are not "
                f"supported yet."
            )
    if not pairs:
        raise AdapterFormatError(f"{directory}: holds no lora_A / lora_B pair.")
    modules = {}
    for name, pair in pairs.items():
        if set(pair) != {"A", "B"}:
            raise AdapterFormatError(f"{directory}: module {name!r} lacks lora_{'B' if 'A' in pair else 'A'}.")
        modules[name] = _folded(name, LoRA(pair["B"], pair["A"]), config, scaling, directory)
    return Adapter(modules, heads), _spec(config, scaling)


def write_adapter(directory: str | os.PathLike[str], adapter: Adapter, spec: AdapterSpec, *, card: str = "") -> None:
    """A PEFT directory that `PeftModel.from_pretrained` loads as base + spec.scaling * B @ A, rank by rank.

    Modules of different ranks become rank_pattern and alpha_pattern. `card` is the text of README.md. Each file is
    written beside and renamed, so a reader never sees half of one.

    Raises:
        AdapterFormatError: a factor is missing, or values are not finite.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, lora in adapter.modules.items():
        B, A = lora.factors
        if lora.rank == 0:
            raise AdapterFormatError(f"module {name!r} has rank 0, which PEFT cannot hold; pad it with `pad_rank`.")
        tensors[f"{PREFIX}{name}.lora_A.weight"], tensors[f"{PREFIX}{name}.lora_B.weight"] = A, B
    tensors |= {f"{PREFIX}{name}": head for name, head in adapter.heads.items()}
    for key, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise AdapterFormatError(f"{key} holds NaN or Inf; nothing was written to {directory}.")

    ranks = adapter.ranks
    common = Counter(ranks.values()).most_common(1)[0][0]
    other = {f"^{re.escape(name)}": r for name, r in ranks.items() if r != common}
    config = {
        **spec.config,
        "peft_type": "LORA",
        "r": common,
        "lora_alpha": _alpha(spec.scaling, common),
        "rank_pattern": other,
        "alpha_pattern": {key: _alpha(spec.scaling, r) for key, r in other.items()},
        "use_rslora": False,
        "init_lora_weights": True,
        "bias": "none",
        "inference_mode": True,
    }
    stored = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    _replace(directory / WEIGHTS_FILE, safetensors.torch.save(stored, metadata={"format": "pt"}))
    _replace(directory / "README.md", (card or _plain_card(spec)).encode())
    _replace(directory / CONFIG_FILE, (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())


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
    config = _model_config(model, name)
    modules = {}
    for path, layer in _lora_layers(model, name):
        B, A = layer.lora_B[name].weight.detach(), layer.lora_A[name].weight.detach()
        fold = layer.scaling[name] / scaling
        modules[path] = LoRA(B.clone() if fold == 1 else B * fold, A.clone())
    heads = {path: parameter.detach().clone() for path, parameter in _head_parameters(model, name)}
    return Adapter(modules, heads), _spec(config, scaling)


def load_into_model(model: nn.Module, adapter: Adapter, name: str = "default", *, scaling: float = 1.0) -> None:
    """Copy `adapter`, in units of `scaling`, into the adapter `name` of a peft model, in place.

    Raises:
        AdapterFormatError: modules, heads or shapes of the two differ.
    """
    layers, heads = dict(_lora_layers(model, name)), dict(_head_parameters(model, name))
    for what, have, want in (("modules", layers, adapter.modules), ("heads", heads, adapter.heads)):
        if set(have) != set(want):
            odd = sorted(set(have) ^ set(want))
            raise AdapterFormatError(f"adapter and model differ in {what}: {odd[:3]} ({len(odd)} in all).")
    with torch.no_grad():
        for path, lora in adapter.modules.items():
            B, A = lora.factors
            layer = layers[path]
            fold = scaling / layer.scaling[name]
            _copy(path, layer.lora_B[name].weight, B if fold == 1 else B * fold)
            _copy(path, layer.lora_A[name].weight, A)
        for path, head in adapter.heads.items():
            _copy(path, heads[path], head)


def _copy(path: str, parameter: Tensor, value: Tensor) -> None:
    if parameter.shape != value.shape:
        raise AdapterFormatError(
            f"{path}: the model has shape {tuple(parameter.shape)}, the adapter {tuple(value.shape)}."
        )
    parameter.copy_(value)


def _lora_layers(model: nn.Module, name: str) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        if name in getattr(module, "lora_A", {}):
            yield path.removeprefix(PREFIX), module


def _head_parameters(model: nn.Module, name: str) -> Iterator[tuple[str, nn.Parameter]]:
    for path, module in model.named_modules():
        saved = getattr(module, "modules_to_save", None)
        if isinstance(saved, nn.ModuleDict) and name in saved:
            for key, parameter in saved[name].named_parameters():
                yield f"{path.removeprefix(PREFIX)}.{key}", parameter


def _model_config(model: Any, name: str) -> dict[str, Any]:
    configs = getattr(model, "peft_config", {})
    if name not in configs:
        raise AdapterFormatError(f"the model has no adapter {name!r}; it has {sorted(configs) or 'none'}.")
    config = {key: _plain(value) for key, value in configs[name].to_dict().items()}
    check_config(config, where=f"adapter {name!r} of the model")
    return config


# ------------------------------------------------------------------------------------------------------- the config


def check_config(config: Mapping[str, Any], *, where: str) -> None:
    """Raises `AdapterFormatError` unless the config means W0 + s B A relative to the pre-trained weights.

    An unknown field that is null, false or empty is warned about; any other is refused, since it may change the update.
    """

    def refuse(field: str, why: str) -> AdapterFormatError:
        return AdapterFormatError(f"{where}: {field} = {config.get(field)!r} is not supported: {why}.")

    if str(config.get("peft_type")).upper().removeprefix("PEFTTYPE.") != "LORA":
        raise refuse("peft_type", "only LORA adapters can be combined")
    for field, why in _REFUSED.items():
        if config.get(field):
            raise refuse(field, why)
    if config.get("bias", "none") != "none":
        raise refuse("bias", "trained biases are no part of B @ A; train with bias='none'")
    if config.get("init_lora_weights", True) not in _PLAIN_INITS:
        raise refuse(
            "init_lora_weights",
            "this initialisation changes the base weights, so the adapter is relative to another base; "
            "save it with peft's path_initial_model_for_weight_conversion",
        )
    for field in ("r", "lora_alpha"):
        value = config.get(field)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0 or not math.isfinite(value):
            raise refuse(field, "it must be a positive number")
    for field in sorted(set(config) - _HARMLESS - _APPLIED - set(_REFUSED)):
        if config[field]:
            raise refuse(field, "the field is unknown (a newer peft?) and may change the update")
        warnings.warn(f"{where}: unknown field {field!r} = {config[field]!r} is ignored.", stacklevel=3)


def _folded(name: str, lora: LoRA, config: Mapping[str, Any], scaling: float, directory: Path) -> LoRA:
    """B times (the module's own scaling / the common one), after a check of the rank that the config promises."""
    r = _by_pattern(config.get("rank_pattern") or {}, name, config["r"])
    if lora.rank != r:
        raise AdapterFormatError(f"{directory}: module {name!r} has rank {lora.rank}, but its config says {r}.")
    alpha = _by_pattern(config.get("alpha_pattern") or {}, name, config["lora_alpha"])
    own = alpha / (math.sqrt(r) if config.get("use_rslora") else r)
    B, A = lora.factors
    return lora if own == scaling else LoRA((B * (own / scaling)).to(B.dtype), A)


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """PEFT's rule: keys are regular expressions for the end of the module path; the first match in file order wins."""
    for key, value in patterns.items():
        try:
            if re.match(rf"(.*\.)?({key})$", module):
                return value
        except re.error as error:
            raise AdapterFormatError(f"pattern {key!r} is not a regular expression: {error}.") from error
    return default


def _is_head(path: str, config: Mapping[str, Any]) -> bool:
    saved = config.get("modules_to_save") or []
    return any(re.search(rf"(^|\.){re.escape(module)}\.(?!.*(lora_|base_layer))", path) for module in saved)


def _spec(config: Mapping[str, Any], scaling: float) -> AdapterSpec:
    kept = {k: v for k, v in sorted(config.items()) if k not in ("r", "lora_alpha", "rank_pattern", "alpha_pattern")}
    if isinstance(kept.get("target_modules"), list):
        kept["target_modules"] = sorted(kept["target_modules"])  # a set in memory: any order on disk
    return AdapterSpec(MappingProxyType(kept), scaling)


def _plain(value: Any) -> Any:
    """A config value as JSON has it: sets sorted, enums by value, nested configs as dicts."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    return getattr(value, "value", value)


def _alpha(scaling: float, r: int) -> float | int:
    alpha = scaling * r
    return int(alpha) if alpha == int(alpha) else alpha


# ------------------------------------------------------------------------------------------------------------ files


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise AdapterFormatError(f"{directory} is no PEFT adapter: it has no {CONFIG_FILE}.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise AdapterFormatError(f"{path} is not JSON: {error}.") from error
    if not isinstance(config, dict):
        raise AdapterFormatError(f"{path} holds no JSON object.")
    return config


def _read_weights(directory: Path) -> dict[str, Tensor]:
    path = directory / WEIGHTS_FILE
    if not path.is_file():
        pickled = [p.name for p in directory.glob("*.bin")]
        why = f"only {pickled[0]}, a pickle, which can run code when read. Save it again with peft" if pickled else "no"
        raise AdapterFormatError(f"{directory} has {why} {WEIGHTS_FILE}.")
    try:
        return safetensors.torch.load_file(path)
    except (SafetensorError, OSError) as error:
        raise AdapterFormatError(f"{path} is damaged or no safetensors file: {error}.") from error


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
