"""Adapters of other tools, and what else is given in place of an adapter: known by its looks, with the way out.

Names only: nothing of a file is read here but what its directory or its header says.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from fedlora.core.echo import quoted, shown
from fedlora.errors import AdapterFormatError

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MOST_NAMES = 10_000  # of a directory, looked at
_CONVERT = "peft's examples/stable_diffusion/convert_sd_adapter_to_peft.py makes a PEFT directory of each part"

# peft_type -> what it is. All are read by peft 0.21, none is an update B @ A.
_OTHER_TYPES: Mapping[str, str] = {
    "LOHA": "LoHa's update is the elementwise product of two B @ A",
    "LOKR": "LoKr's update is a Kronecker product",
    "IA3": "IA3 multiplies activations by learned vectors",
    "OFT": "OFT rotates the base weights",
    "BOFT": "BOFT rotates the base weights",
    "HRA": "HRA reflects the base weights",
    "VERA": "VeRA's update is of shared random matrices and learned vectors",
    "PVERA": "PVeRA's update is of shared random matrices and learned vectors",
    "VBLORA": "VB-LoRA's factors are mixed from a shared bank of vectors",
    "XLORA": "X-LoRA mixes several adapters by what it reads",
    "FOURIERFT": "FourierFT's update is a sum of waves",
    "GLORA": "peft's GLORA is Generalized LoRA, which scales the base weights too (not the federated method GLoRA)",
    "RANDLORA": "RandLoRA's update is of shared random matrices",
    "LN_TUNING": "these are trained layer norms",
    "TRAINABLE_TOKENS": "these are trained rows of an embedding, without LoRA",
    "PROMPT_TUNING": "these are learned prompts, not weights",
    "MULTITASK_PROMPT_TUNING": "these are learned prompts, not weights",
    "P_TUNING": "these are learned prompts, not weights",
    "PREFIX_TUNING": "these are learned prefixes, not weights",
    "CPT": "these are learned prompts, not weights",
    "ADAPTION_PROMPT": "these are learned prompts, not weights",
    "POLY": "Poly mixes several adapters by task",
    "BONE": "Bone's update is no product B @ A",
    "MISS": "MiSS's update is no product B @ A",
    "SHIRA": "SHiRA's update is sparse",
}

# What a key begins with or holds -> (format, way out). The first that fits is named.
_KEYS: tuple[tuple[re.Pattern[str], str, str], ...] = (
    (re.compile(r"lora_(unet|te|te1|te2|te3|transformer)_\w+\.(lora_down\.weight|lora_up\.weight|alpha|dora_scale)"),
     "an adapter of kohya's sd-scripts (lora_down, lora_up and alpha, names with underscores)", _CONVERT),
    (re.compile(r"lora_\w+\.(hada_|lokr_).*"),
     "a LoHa or LoKr of LyCORIS", "its update is no product B @ A"),
    (re.compile(r"(unet|text_encoder|text_encoder_2|transformer)\..*(lora|processor).*"),
     "an adapter of diffusers (pytorch_lora_weights.safetensors)", _CONVERT),
    (re.compile(r"diffusion_model\..*lora.*"), "an adapter of ComfyUI's form (diffusion_model....)", _CONVERT),
    (re.compile(r".*\.lora_[ab]"),
     "an adapter of MLX (lora_a and lora_b)",
     "mlx_lm.fuse writes the full model; train with peft for an adapter that others can read"),
    (re.compile(r".*\.lora_[AB]\.(?!weight$|bias$)[^.]+\.weight"),
     "a model's state_dict, with the adapter's name in its keys",
     "save it with peft: model.save_pretrained(DIRECTORY)"),
    (re.compile(r"(?!base_model\.)(.*)\.lora_(A|B)\.weight"),
     "LoRA without peft's prefix 'base_model.model.'", "save it with peft: model.save_pretrained(DIRECTORY)"),
    (re.compile(r"prompt_embeddings|base_model\.prompt_encoder.*"), "a learned prompt", "it is no update B @ A"),
)  # fmt: skip
_FULL = re.compile(r"(?:(?:model|transformer|bert|roberta|gpt_neox|encoder|decoder|lm_head|h|wte)\.).*\.?weight")


def check_config(config: Mapping[str, Any]) -> None:
    """Raises `AdapterFormatError` for the config of another tool, or of another kind of adapter."""
    if "peft_type" not in config and {"fine_tune_type", "lora_parameters"} & set(config):
        raise _foreign(
            "an adapter of MLX (adapter_config.json with lora_parameters)",
            "mlx_lm.fuse writes the full model; train with peft for an adapter that others can read",
        )
    if "peft_type" not in config and {"architectures", "model_type"} & set(config):
        raise _foreign("the config of a full model", "give the directory of an adapter")
    kind = config.get("peft_type")
    what = _OTHER_TYPES.get(kind.upper()) if isinstance(kind, str) else None
    if what is not None:
        raise AdapterFormatError(
            f"peft_type = {quoted(kind)} is not supported: {what}. LORA adapters can be combined (and ADALORA's as "
            f"LORA)."
        )


def check_keys(keys: Collection[str]) -> None:
    """Raises `AdapterFormatError` for the tensors of another tool, by the first of its keys."""
    first = next((key for key in keys if "lora" in key or "hada_" in key or "lokr_" in key or "prompt" in key), None)
    for pattern, what, way in _KEYS if first is not None else ():
        if pattern.fullmatch(first or ""):
            raise _foreign(f"{what}, such as {quoted(first)}", way)
    if first is None and any(_FULL.fullmatch(key) for key in islice(keys, 3)):
        raise _foreign("a full model, without any LoRA", "give the directory of an adapter")


def check_folder(directory: Path) -> None:
    """Raises `AdapterFormatError` for a place that has not both of an adapter's files, where it can say what it is."""
    if not directory.is_dir():
        raise AdapterFormatError(f"{directory} is no PEFT adapter: {_no_directory(directory)}.")
    with os.scandir(directory) as entries:
        names = {entry.name for entry in islice(entries, _MOST_NAMES)}
    found = _folder(directory, names)
    if found is not None:
        raise AdapterFormatError(f"{directory} is no PEFT adapter: {found}.")


def _no_directory(path: Path) -> str:
    if path.is_file():
        if path.name in (_WEIGHTS, _CONFIG, "adapter_model.bin"):
            return f"it is one of its files; give the directory, {shown(path.parent)}"
        if path.suffix in (".zip", ".tar", ".gz", ".tgz", ".7z"):
            return "it is an archive; unpack it, and give the directory"
        if path.suffix == ".gguf":
            return "it is a GGUF file of llama.cpp; give the PEFT directory that it was made from"
        if path.suffix == ".safetensors":
            return (
                f"it is a single file, as sd-scripts, diffusers and MLX write; PEFT's is a directory of {_CONFIG} and "
                f"{_WEIGHTS}"
            )
        return f"it is a file; give a directory of {_CONFIG} and {_WEIGHTS}"
    if not os.path.lexists(path) and re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", str(path)):
        return f"there is no such directory. A repository of the hub? hf download {path} --local-dir DIRECTORY gets it"
    return "there is no such directory"


def _folder(directory: Path, names: Collection[str]) -> str | None:
    """What a directory is, by the names in it."""
    adapters = _adapters_below(directory, names)
    for test, what in (
        ({"adapter_model.safetensors.index.json"} <= set(names) or _any(names, r"adapter_model-\d+-of-\d+\..*"),
         f"its weights are split over several files (sharded), which peft does not load either; join them into one "
         f"{_WEIGHTS} with safetensors.torch: load_file of each part, save_file of all"),
        (_CONFIG in names and "adapters.safetensors" in names,
         "it is an adapter of MLX (adapters.safetensors); mlx_lm.fuse writes the full model; train with peft for an "
         "adapter that others can read"),
        (_CONFIG in names and "adapter_model.bin" in names,
         f"it has only adapter_model.bin, a pickle, which can run code when it is read; save it again with a current "
         f"peft, which writes {_WEIGHTS}"),
        ({"manifest.json", "metrics.jsonl"} & set(names) and "config.json" in names and adapters,
         f"it is the folder of a run; its adapters are {', '.join(adapters)}"),
        (adapters,
         f"it has no adapter of its own, but below: {', '.join(adapters)}"),
        ("pytorch_lora_weights.safetensors" in names,
         f"it is an adapter of diffusers (pytorch_lora_weights.safetensors); {_CONVERT}"),
        (_any(names, r".*\.gguf"),
         "it holds a GGUF file of llama.cpp; give the PEFT directory that it was made from"),
        ("pytorch_adapter.bin" in names,
         "it is an adapter of AdapterHub's library (pytorch_adapter.bin), and a pickle"),
        (_any(names, r"(model|pytorch_model)([-.].*)?\.(safetensors|bin)(\.index\.json)?"),
         "it is a full model; give the directory of an adapter"),
    ):  # fmt: skip
        if test:
            return what
    return None


def _any(names: Collection[str], pattern: str) -> bool:
    return any(re.fullmatch(pattern, name) for name in names)


def _adapters_below(directory: Path, names: Collection[str]) -> list[str]:
    """Directories with an adapter, one level down or two, the last checkpoint first; a few of them."""
    if _CONFIG in names:
        return []
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
    return AdapterFormatError(f"this is {what}, not an adapter of peft: {way}.")
