"""Writes a PEFT adapter: its modules named in full, alpha = scaling * r, whole or not at all, and read back."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad

from fedlora.adapters.base_names import is_path
from fedlora.adapters.reader import CONFIG_FILE, PREFIX, WEIGHTS_FILE, AdapterFile, check_scaling
from fedlora.core import files
from fedlora.core.folders import FolderKind, replacing_folder
from fedlora.core.lora import Adapter, LoRA
from fedlora.core.read_only import ReadOnly
from fedlora.core.text import MOST, yaml_string
from fedlora.errors import AdapterFormatError, escaped

# The fields that a copy keeps. All others follow from the numbers, or have no effect once modules are named in full.
_KEPT = (
    "auto_mapping", "base_model_name_or_path", "fan_in_fan_out", "lora_dropout", "modules_to_save", "revision",
    "task_type",
)  # fmt: skip
_WITH_HEADS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")  # for these peft expects a saved head, whatever the config says
_FILES = rf"{re.escape(CONFIG_FILE)}|{re.escape(WEIGHTS_FILE)}|README\.md"
ADAPTER_FOLDER = FolderKind("an adapter", CONFIG_FILE, rf"{_FILES}|labels\.json")
UPLOAD_FOLDER = FolderKind("an upload", CONFIG_FILE, rf"{_FILES}|upload\.json")


@dataclass(frozen=True)
class AdapterSpec:
    """What a PEFT adapter says besides its numbers: the base model, the task, the saved modules.

    config: fields of adapter_config.json. Ranks, alphas and target_modules follow from the adapter that is written.
    scaling: the update is scaling * B @ A for the adapter that this spec came with.

    Example:
        >>> spec = AdapterSpec({"base_model_name_or_path": "org/model"}, scaling=2.0)
        >>> write_adapter("from-nothing", Adapter(seed_adapter.modules), spec)
        >>> read_adapter("from-nothing", scaling=2.0)[1].scaling
        2.0
    """

    config: Mapping[str, Any]
    scaling: float = 1.0

    @property
    def base_model(self) -> str | None:
        name: str | None = self.config.get("base_model_name_or_path")
        return name


def spec_of(config: Mapping[str, Any], scaling: float) -> AdapterSpec:
    """The spec of an adapter with this checked config."""
    kept = {field: config[field] for field in _KEPT if field in config}
    auto = kept.get("auto_mapping")
    if not isinstance(auto, Mapping) or not str(auto.get("parent_library")).startswith("transformers."):
        kept.pop("auto_mapping", None)  # peft would import the module that it names
    dropout = kept.get("lora_dropout")
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        kept.pop("lora_dropout", None)
    return AdapterSpec(ReadOnly(kept), scaling)


def write_adapter(directory: str | os.PathLike[str], adapter: Adapter, spec: AdapterSpec, *, card: str = "") -> None:
    """Write a PEFT directory that `PeftModel.from_pretrained` loads as base + spec.scaling * B @ A, rank by rank.

    Modules of different ranks become rank_pattern and alpha_pattern. If the base weights have moved, the factors
    include that change (`Adapter.folded`), since users of the directory load the pre-trained weights. `card` is the
    text of README.md. The directory appears whole, by one rename, after `AdapterFile` has read it back. It must be new,
    empty, or contain only an adapter, which is replaced.

    Raises:
        AdapterFormatError: a factor is missing, a module has rank 0, values are not finite, or `AdapterFile` refuses
            the result. ConfigError: the directory cannot be written, or holds other files.

    Example:
        >>> adapter, spec = read_adapter("adapter", scaling=2.0)
        >>> write_adapter("copy", adapter, spec)  # the same factors, bit for bit
    """
    check_scaling(spec.scaling)
    whole = adapter.folded()
    if not whole.modules or 0 in whole.ranks.values():
        raise AdapterFormatError("a PEFT adapter has modules, each of rank 1 or more; nothing was written.")
    with replacing_folder(directory, force=True, kind=ADAPTER_FOLDER) as building:
        fill_adapter(building, whole, spec, card)


def fill_adapter(folder: Path, adapter: Adapter, spec: AdapterSpec, card: str = "") -> None:
    """Write a folded adapter's files into an existing folder, and read them back. Arguments as in `write_adapter`."""
    tensors = {PREFIX + path: head for path, head in adapter.heads.items()}
    for name, lora in adapter.modules.items():
        tensors |= {f"{PREFIX}{name}.lora_{letter}.weight": tensor for letter, tensor in lora.tensors().items()}
    save_file(_apart(tensors), folder / WEIGHTS_FILE, metadata={"format": "pt"})
    files.write(folder / "README.md", card or plain_card(spec.base_model))
    config = _config(spec, adapter.ranks, list(adapter.heads))
    files.write(folder / CONFIG_FILE, json.dumps(config, indent=2, sort_keys=True) + "\n")
    try:
        AdapterFile(folder, max_bytes=2**62).check()
    except AdapterFormatError as error:
        why = str(error).replace(f"{escaped(str(folder))}: ", "")
        raise AdapterFormatError(f"the result could not be loaded, so nothing was written: {why}") from error


def plain_card(base: str | None) -> str:
    front = f"---\nlibrary_name: peft\n{base_line(base)}tags:\n- lora\n- fedlora\n---\n"
    return f"{front}\nA LoRA adapter written by fedlora.\n"


def base_line(base: str | None) -> str:
    """A card's line `base_model: ...`; "" if the base is not named, or is a path on this machine."""
    if not base or len(base) > MOST or is_path(base) or not base.isprintable() or os.path.lexists(base):
        return ""
    return f"base_model: {yaml_string(base)}\n"


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that safetensors writes: on the CPU, contiguous, each in memory of its own."""
    found, places = {}, set()
    for key, tensor in tensors.items():
        own = tensor.detach().to("cpu").contiguous()
        memory = own.untyped_storage()
        if memory.nbytes() != own.nbytes or memory.data_ptr() in places:
            own = own.clone()
        places.add(own.untyped_storage().data_ptr())
        found[key] = own
    return found


def pad_rank(lora: LoRA, rank: int) -> LoRA:
    """The same update padded to `rank` with zero slots: for export only, since such slots cannot train."""
    B, A = lora.factors
    grow = max(rank - lora.rank, 0)
    return LoRA(pad(B, (0, grow)), pad(A, (0, 0, 0, grow))) if grow else lora


def _config(spec: AdapterSpec, ranks: Mapping[str, int], heads: list[str]) -> dict[str, Any]:
    """adapter_config.json. It has no field that peft 0.2 does not know, unless the numbers need it."""
    largest = max(ranks.values())  # r: readers that ignore patterns then allocate enough
    names = spec.config.get("modules_to_save") or ()
    saved = [name for name in names if any(f"{name}." in path for path in heads)]  # peft asks for each, reads no other
    unnamed = {h.rpartition(".")[0] for h in heads if not any(f"{name}." in h for name in saved)}
    task = spec.config.get("task_type")
    found: dict[str, Any] = {
        **{field: value for field, value in spec.config.items() if field in _KEPT and value is not None},
        "peft_type": "LORA",
        "r": largest,
        "lora_alpha": _alpha(spec.scaling, largest),
        "target_modules": list(ranks),
        "modules_to_save": [*saved, *sorted(unnamed)] or None,
        "task_type": None if not heads and task in _WITH_HEADS else task,
        "base_model_name_or_path": spec.base_model,
        "bias": "none",
        "inference_mode": True,
    }
    others = {name: r for name, r in ranks.items() if r != largest}
    if others:
        # peft compares such a name with a module's end, so we anchor it if it is the end of another
        bare = not any(name.endswith(f".{other}") for name in ranks for other in others)
        patterns = {name if bare else f"^{re.escape(name)}": r for name, r in others.items()}
        found["rank_pattern"] = patterns
        found["alpha_pattern"] = {name: _alpha(spec.scaling, r) for name, r in patterns.items()}
    return found


def _alpha(scaling: float, r: int) -> float | int:
    alpha = scaling * r
    return int(alpha) if alpha == int(alpha) else alpha
