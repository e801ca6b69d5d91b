"""A run's own files, its data and its model: which they are, and what they are known by.

A name is not enough: two data sets of one name in two folders are two, and one that has moved is still the same. So
they are known by their content.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from fedlora.errors import ConfigError
from fedlora.runs.config import RunConfig

MISSING = "missing"
_READ_BY_TRANSFORMERS = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "additional_chat_templates/*.jinja")


def own_paths(config: RunConfig) -> dict[str, str]:
    """Key -> path of each file or folder of one's own: the absolute ones, as `config.located` leaves them."""
    data = config.data
    told = {
        "data.train": data.train,
        **{f"data.clients.{client}": path for client, path in data.clients.items()},
        "data.validation": data.validation,
        "data.test": data.test,
        "model.path": config.model.path,
    }
    return {key: path for key, path in told.items() if isinstance(path, str) and os.path.isabs(path)}


def with_paths(config: RunConfig, new: Mapping[str, str]) -> RunConfig:
    """The configuration with other words in place of the paths of these keys."""
    data, model = config.data, config.model
    parts = {part: new[f"data.{part}"] for part in ("train", "validation", "test") if f"data.{part}" in new}
    clients = {client: new.get(f"data.clients.{client}", path) for client, path in data.clients.items()}
    return config.model_copy(
        update={
            "data": data.model_copy(update={**parts, "clients": clients}),
            "model": model.model_copy(update={"path": new.get("model.path", model.path)}),
        }
    )


def named(config: RunConfig) -> RunConfig:
    """With the names of one's own files in place of where they are."""
    return with_paths(config, {key: Path(path).name for key, path in own_paths(config).items()})


def contents(config: RunConfig) -> dict[str, str]:
    """Key -> SHA-256 of what is there, with a file's suffix, which says how it is read; `MISSING` where nothing is.

    Raises:
        ConfigError: it cannot be read.
    """
    return {key: _content(key, Path(path)) for key, path in own_paths(config).items()}


def digest_of(config: RunConfig, files: Mapping[str, str]) -> str:
    """The configuration's digest with its own files known by their content, as `contents` has it. It is the
    configuration's own where it has none."""
    return with_paths(config, files).digest()


def _content(key: str, path: Path) -> str:
    try:
        if path.is_dir():
            parts = [path, *_model_files(path)]
            seen = tuple((part.name, (s := part.stat()).st_size, s.st_mtime_ns) for part in sorted(parts))
            return _of_folder(path, seen)
        there = path.stat()
        return f"{_of_file(path, there.st_size, there.st_mtime_ns)}{path.suffix.lower()}"
    except FileNotFoundError:
        return MISSING
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error.strerror or error}.") from error


@functools.cache
def _of_file(path: Path, size: int, changed: int) -> str:
    """size, changed: so that a file that has changed since is read again."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@functools.cache
def _of_folder(path: Path, seen: tuple[tuple[str, int, int], ...]) -> str:
    """Of a model, as its run's manifest has it."""
    return hashlib.sha256(json.dumps(model_content(path), sort_keys=True).encode()).hexdigest()


def model_content(path: str | os.PathLike[str]) -> dict[str, str]:
    """File name -> SHA-256 of every file of a local model that transformers may read: weights, configurations,
    tokenizer, chat templates; of a GGUF file its own; empty for a hub id."""
    place = Path(path)
    found = [place] if place.is_file() else _model_files(place)
    root = place.parent if place.is_file() else place
    read = {file.relative_to(root).as_posix(): (file, file.stat()) for file in found}
    return {name: _of_file(file, there.st_size, there.st_mtime_ns) for name, (file, there) in read.items()}


def _model_files(folder: Path) -> list[Path]:
    return sorted(file for name in _READ_BY_TRANSFORMERS for file in folder.glob(name))
