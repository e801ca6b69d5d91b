"""A run's own files, its data, its model and its method's code: which they are, and what they are known by.

A name is not enough: two data sets of one name in two folders are two, and one that has moved is still the same. So
they are known by their content.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from fedlora.errors import ConfigError, HyperparameterError
from fedlora.methods.plugins import code_of
from fedlora.methods.registry import find
from fedlora.runs.config import RunConfig
from fedlora.training.content import file_digest, model_content

MISSING = "missing"
_CODE = "method.name"  # the key of the code of a method that is not ours


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
    data, model, method = config.data, config.model, config.method
    parts = {part: new[f"data.{part}"] for part in ("train", "validation", "test") if f"data.{part}" in new}
    clients = {client: new.get(f"data.clients.{client}", path) for client, path in data.clients.items()}
    return config.model_copy(
        update={
            "data": data.model_copy(update={**parts, "clients": clients}),
            "model": model.model_copy(update={"path": new.get("model.path", model.path)}),
            "method": method.model_copy(update={"name": new.get(_CODE, method.name)}),
        }
    )


def named(config: RunConfig) -> RunConfig:
    """With the names of one's own files in place of where they are."""
    return with_paths(config, {key: Path(path).name for key, path in own_paths(config).items()})


def contents(config: RunConfig) -> dict[str, str]:
    """Key -> SHA-256 of what is there, with a file's suffix, which says how it is read; `MISSING` where nothing is.
    Of a method that is not ours its code, by "method.name".

    Raises:
        ConfigError: it cannot be read.
    """
    found = {key: _content(key, Path(path)) for key, path in own_paths(config).items()}
    code = {_CODE: _code(config.method.name)}
    return found | {key: digest for key, digest in code.items() if digest}


def digest_of(config: RunConfig, files: Mapping[str, str]) -> str:
    """The configuration's digest with its own files known by their content, as `contents` has it. It is the
    configuration's own where it has none."""
    return with_paths(config, files).digest()


def _code(method: str) -> str:
    """Empty for a method of ours."""
    try:
        code = code_of(find(method))
    except HyperparameterError:  # said where it is to be run
        return MISSING
    return hashlib.sha256(json.dumps(code).encode()).hexdigest() if code else ""


def _content(key: str, path: Path) -> str:
    try:
        if path.is_dir():
            told = json.dumps(model_content(path), sort_keys=True)  # as its run's manifest has it
            return hashlib.sha256(told.encode()).hexdigest()
        return f"{file_digest(path)}{path.suffix.lower()}"
    except FileNotFoundError:
        return MISSING
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error.strerror or error}.") from error
