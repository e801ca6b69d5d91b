"""Recognises other tools' adapters, and anything else given in place of an adapter, and names the way out.

It looks at names only: a directory's listing, or a file's header.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from fedlora.core.text import quoted, shown
from fedlora.errors import AdapterFormatError

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MOST_NAMES = 10_000  # the most directory entries we look at
_CONVERT = "peft's examples/stable_diffusion/convert_sd_adapter_to_peft.py makes a PEFT directory of each part"
_MLX = "mlx_lm.fuse writes the full model; train with peft for an adapter that others can read"
_SAVE = "save it with peft: model.save_pretrained(DIRECTORY)"
_GIVE = "give the directory of an adapter"

# A pattern for keys -> (format, way out). The first match wins.
_KEYS: tuple[tuple[str, str, str], ...] = (
    (r"lora_\w+\.(lora_down\.weight|lora_up\.weight|alpha|dora_scale|hada_.*|lokr_.*)",
     "an adapter of kohya's sd-scripts or LyCORIS (names with underscores)", _CONVERT),
    (r"(unet|text_encoder|text_encoder_2|transformer)\..*(lora|processor).*", "an adapter of diffusers", _CONVERT),
    (r"diffusion_model\..*lora.*", "an adapter of ComfyUI's form (diffusion_model....)", _CONVERT),
    (r".*\.lora_[ab]", "an adapter of MLX (lora_a and lora_b)", _MLX),
    (r".*\.lora_[AB]\.(?!weight$|bias$)[^.]+\.weight",
     "a model's state_dict with the adapter's name in its keys", _SAVE),
    (r"(?!base_model\.)(.*)\.lora_(A|B)\.weight", "LoRA without peft's prefix 'base_model.model.'", _SAVE),
    (r"(?:(?:model|transformer|bert|roberta|gpt_neox|encoder|decoder|lm_head|h|wte)\.).*\.?weight",
     "a full model, without any LoRA", _GIVE),
)  # fmt: skip
# A pattern for file names in a directory -> what it is. The first match wins.
_FILES: tuple[tuple[str, str], ...] = (
    (r"adapter_model(-\d+-of-\d+\..*|\.safetensors\.index\.json)",
     f"its weights are split over several files (sharded), which peft does not load either; join them into one "
     f"{_WEIGHTS} with safetensors.torch: load_file of each part, save_file of all"),
    (r"adapters\.safetensors", f"it is an adapter of MLX (adapters.safetensors); {_MLX}"),
    (r"adapter_model\.bin",
     f"it has only adapter_model.bin, a pickle, which can run code when read; save it again with a current peft, "
     f"which writes {_WEIGHTS}"),
    (r"pytorch_lora_weights\.safetensors", f"it is an adapter of diffusers; {_CONVERT}"),
    (r".*\.gguf", "it holds a GGUF file of llama.cpp; give the PEFT directory that it was made from"),
    (r"(model|pytorch_model)([-.].*)?\.(safetensors|bin)(\.index\.json)?", f"it is a full model; {_GIVE}"),
)  # fmt: skip


def check_config(config: Mapping[str, Any]) -> None:
    """Raise `AdapterFormatError` for another tool's config."""
    if "peft_type" not in config and {"fine_tune_type", "lora_parameters"} & set(config):
        raise _foreign("an adapter of MLX (adapter_config.json with lora_parameters)", _MLX)
    if "peft_type" not in config and {"architectures", "model_type"} & set(config):
        raise _foreign("the config of a full model", _GIVE)


def check_keys(keys: Collection[str]) -> None:
    """Raise `AdapterFormatError` for another tool's tensors, by the first key that identifies it."""
    first = next((key for key in keys if "lora" in key or "hada_" in key or "lokr_" in key), None)
    for key in [first] if first is not None else islice(keys, 3):
        for pattern, what, way in _KEYS:
            if re.fullmatch(pattern, key):
                raise _foreign(f"{what}, such as {quoted(key)}", way)


def check_folder(directory: Path) -> None:
    """Raise `AdapterFormatError` for a directory that lacks an adapter's files, if we can say what it is."""
    if not directory.is_dir():
        raise AdapterFormatError(f"{directory} is not a PEFT adapter: {_no_directory(directory)}.")
    with os.scandir(directory) as entries:
        names = {entry.name for entry in islice(entries, _MOST_NAMES)}
    below = [] if _CONFIG in names else _adapters_below(directory, names)
    if below:
        whose = "it is the folder of a run; its adapters are" if "manifest.json" in names else "it has adapters below:"
        raise AdapterFormatError(f"{directory} is not a PEFT adapter: {whose} {', '.join(below)}.")
    for pattern, what in _FILES:
        if any(re.fullmatch(pattern, name) for name in names):
            raise AdapterFormatError(f"{directory} is not a PEFT adapter: {what}.")


def _no_directory(path: Path) -> str:
    if path.is_file():
        if path.name in (_CONFIG, _WEIGHTS):
            return f"it is one of its files; give the directory, {shown(path.parent)}"
        if path.suffix == ".safetensors":
            return f"it is a single file, as sd-scripts, diffusers and MLX write; {_CONVERT}"
        return f"it is a file; give a directory of {_CONFIG} and {_WEIGHTS}"
    if not os.path.lexists(path) and re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", str(path)):
        return f"there is no such directory. For a repository of the hub, name a revision too: {path}@main"
    return "there is no such directory"


def _adapters_below(directory: Path, names: Collection[str]) -> list[str]:
    """Up to three directories with an adapter, at most two levels down, newest checkpoint first."""
    found = []
    for name in islice(sorted(names, key=_newest_first), 200):
        place = directory / name
        if place.is_dir() and not place.is_symlink():
            if (place / _CONFIG).is_file():
                found.append(name)
            else:
                with os.scandir(place) as entries:
                    inner = sorted(entry.name for entry in islice(entries, 200))
                found += [f"{name}/{one}" for one in inner if (place / one / _CONFIG).is_file()]
        if len(found) >= 3:
            break
    return [shown(name) for name in found[:3]]


def _newest_first(name: str) -> tuple[int, str]:
    step = re.fullmatch(r"checkpoint-(\d{1,9})", name)
    return (-int(step[1]), name) if step else (0, name)


def _foreign(what: str, way: str) -> AdapterFormatError:
    return AdapterFormatError(f"this is {what}, not a PEFT adapter: {way}.")
