"""Digests that identify a base model: SHA-256 of its files, of its weights whatever their file layout, and of its
tokenizer. Nothing is loaded, and a file is read again only if its size or times change."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedlora.data.hub import MODEL_TEXTS, file_digest, readable
from fedlora.doing import doing
from fedlora.errors import ConfigError
from fedlora.training.load import hub_name, model_place, weight_files


@doing("hashing the base model")
def model_content(path: str | os.PathLike[str]) -> dict[str, str]:
    """File name -> SHA-256 for the weights, configuration and tokenizer in a model's or an adapter's folder; for a GGUF
    file its own; for a hub id those of its cached snapshot. Empty if nothing is there."""
    place = Path(path) if Path(path).exists() else _cached(os.fspath(path))
    if place is None:
        return {}
    if place.is_file():
        return {place.name: file_digest(place)}
    found = {file for pattern in MODEL_TEXTS for file in place.glob(pattern) if file.is_file()}
    with contextlib.suppress(ConfigError):  # an adapter's folder; or it is reported when the model is loaded
        found |= set(weight_files(place))
    found |= set(place.glob("adapter_model.safetensors"))
    return {file.relative_to(place).as_posix(): file_digest(file) for file in sorted(found)}


def model_commit(path: str | os.PathLike[str]) -> str | None:
    """The hub's commit of a snapshot, or of a hub id's cached one; None for any other model."""
    place = Path(path) if Path(path).exists() else _cached(os.fspath(path))
    return place.name if place is not None and hub_name(str(place)) and place.parent.name == "snapshots" else None


def _cached(model: str) -> Path | None:
    """The cached snapshot that would be loaded for a hub id offline."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


@doing("hashing the base model")
def base_digest(path: str | os.PathLike[str]) -> str:
    """SHA-256 (hex) of a base model's weights: each tensor's name, type, shape and bytes, sorted by name, so that a
    single file and shards of it agree. A GGUF file counts as a whole, with architecture and tokenizer.

    Raises:
        ConfigError: no such model, or its files are not weights.
    """
    if (file := Path(path)).is_file():
        return file_digest(file)
    tensors = [each for file in weight_files(model_place(path)) for each in _tensors(file)]
    lines = "".join(f"{json.dumps(name)} {line}\n" for name, line in sorted(tensors))
    return hashlib.sha256(lines.encode()).hexdigest()


def _tensors(file: Path) -> Iterator[tuple[str, str]]:
    """Name, and type, shape and digest, of each tensor in a file of weights. Its bytes are memory-mapped."""
    import torch
    from safetensors import safe_open

    with readable(f"the weights {file} are not a complete file of tensors alone", " Fetch the model again."):
        if file.suffix == ".bin":
            each: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True).items()
        else:
            stored: Any = safe_open(file, framework="pt")
            names: list[str] = stored.keys()
            each = ((name, stored.get_tensor(name)) for name in names)
        for name, tensor in each:
            raw = tensor.reshape(-1).view(torch.uint8).numpy()
            yield name, f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(raw).hexdigest()}"


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 (hex) of what makes tokens of texts: vocabulary, merges, normalisation, added and special tokens. It does
    not depend on the files' layout, nor on settings for cutting and padding, which each user gives."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    facts: Any = {"vocabulary": sorted(tokenizer.get_vocab().items())}
    if backend is not None:
        facts = {k: v for k, v in json.loads(backend.to_str()).items() if k not in ("truncation", "padding")}
    special = [str(getattr(tokenizer, f"{name}_token", None)) for name in ("bos", "eos", "unk", "sep", "cls", "mask")]
    return hashlib.sha256(json.dumps([facts, special], sort_keys=True).encode()).hexdigest()


def template_digest(tokenizer: Any) -> str:
    """SHA-256 (hex) of the tokenizer's chat template; "" if it has none."""
    found = getattr(tokenizer, "chat_template", None)
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest() if found else ""
