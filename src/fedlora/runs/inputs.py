"""What a run reads: digests of its model and its data, and its own files by content.

Names are not enough: their content may have changed, and a moved file is still the same.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedlora.attacks import Adversary
from fedlora.data import TextData
from fedlora.errors import ConfigError
from fedlora.runs.attack_section import with_flipped_labels
from fedlora.runs.client_data import Dealt, Keep, deal
from fedlora.runs.config import RunConfig
from fedlora.training.digests import file_digest, model_commit, model_content

MODEL, DATA = "the model", "the data"
MISSING = "missing"


def facts_of(config: RunConfig, data: Dealt) -> dict[str, Any]:
    """A manifest's "model" and "data": digests of everything the run reads, with sizes for data."""
    place = config.model.location()
    commit = model_commit(place)
    return {
        "model": {
            "name": config.model.name,
            "sha256": model_content(place),
            **({"commit": commit} if commit is not None else {}),
            **({"adapter": model_content(config.model.adapter)} if config.model.adapter is not None else {}),
        },
        "data": {
            "train": {client: _size(part) for client, part in data.parts.items()},
            "validation": _size(TextData.concat(list(data.validation.values()))),
            "test": _size(TextData.concat(list(data.test.values()))),
            "probes": {name: _size(TextData.concat(list(sets.values()))) for name, sets in data.probes.items()},
            "own_test": {c: _size(p) for c, p in data.own_test.items()} if config.clients.test_fraction else {},
            "label_names": list(data.classes),
        },
    }


def _size(data: TextData) -> dict[str, Any]:
    return {"examples": len(data), "sha256": data.digest()}


def dealt_out(
    config: RunConfig, data_root: Path | None, label_names: Sequence[str] = (), keep: Keep | None = None
) -> tuple[Dealt, Adversary | None]:
    """The data as clients train on them, labels flipped where one lies so; and who is byzantine. Raises as `deal`, and
    `ConfigError` if nobody or everybody would be byzantine, or cannot."""
    data = deal(config, data_root, label_names, keep)
    adversary = config.attack.adversary(list(data.parts), config.run.seed)
    return replace(data, parts=with_flipped_labels(data.parts, adversary)), adversary


def differing(there: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, list[str]]:
    """What differs between two records of `facts_of`, in words, by `MODEL` and `DATA`; only tables in `here` count."""
    found: dict[str, list[str]] = {}
    for table, name in (("model", MODEL), ("data", DATA)):
        theirs, ours = _named(there.get(table) or {}), _named(here.get(table) or {})
        odd = [key for key in dict.fromkeys((*theirs, *ours)) if theirs.get(key) != ours.get(key)]
        if table in here and odd:
            found[name] = [_compared(key, theirs.get(key), ours.get(key)) for key in odd]
    return found


def _named(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a table of `facts_of`, by words."""
    each = {"sha256": "the model's {}", "adapter": "the adapter's {}", "train": "the data of {!r}"}
    each |= {"probes": "the data of {!r}", "own_test": "the own test set of {!r}"}
    found = {words.format(name): one for part, words in each.items() for name, one in (facts.get(part) or {}).items()}
    whole = {"validation": "the validation data", "test": "the test data", "label_names": "the names of the labels"}
    return found | {words: facts[part] for part, words in (whole | {"chat_template": "the prompt template"}).items()
                    if part in facts}  # fmt: skip


def _compared(what: str, there: Any, here: Any) -> str:
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        return f"{what} ({there['examples']} examples there, {here['examples']} here)"
    return what


# ---- the user's own files --------------------------------------------------------------------------------------------


def own_paths(config: RunConfig) -> dict[str, str]:
    """Key -> path for each of the user's own files or folders: the absolute paths left by `config.located`."""
    data = config.data
    told = {
        "data.train": data.train,
        **{f"data.clients.{client}": path for client, path in data.clients.items()},
        "data.validation": data.validation,
        "data.test": data.test,
        **{f"data.task_lists.{k}": path for k, path in enumerate(data.task_lists)},
        "model.name": config.model.name,
        "model.adapter": config.model.adapter,
    }
    return {key: path for key, path in told.items() if isinstance(path, str) and os.path.isabs(path)}


def with_paths(config: RunConfig, new: Mapping[str, str]) -> RunConfig:
    """The configuration with these keys' paths replaced."""
    data, model = config.data, config.model
    parts = {part: new[f"data.{part}"] for part in ("train", "validation", "test") if f"data.{part}" in new}
    clients = {client: new.get(f"data.clients.{client}", path) for client, path in data.clients.items()}
    lists = [new.get(f"data.task_lists.{k}", path) for k, path in enumerate(data.task_lists)]
    there = {key: new.get(f"model.{key}", getattr(model, key)) for key in ("name", "adapter")}
    return config.model_copy(
        update={
            "data": data.model_copy(update={**parts, "clients": clients, "task_lists": lists}),
            "model": model.model_copy(update=there),
        }
    )


def contents(config: RunConfig) -> dict[str, str]:
    """Key -> SHA-256 of the file, plus its suffix, which decides how it is read; `MISSING` if it is not there.

    Raises:
        ConfigError: a file cannot be read.
    """
    return {key: _content(key, Path(path)) for key, path in own_paths(config).items()}


def digest_of(config: RunConfig, files: Mapping[str, str]) -> str:
    """The configuration's digest with its own files identified by content, as in `contents`. Equal to the plain digest
    if there are none."""
    return with_paths(config, files).digest()


def _content(key: str, path: Path) -> str:
    try:
        if path.is_dir():
            told = json.dumps(model_content(path), sort_keys=True)  # as in the run's manifest
            return hashlib.sha256(told.encode()).hexdigest()
        return f"{file_digest(path)}{path.suffix.lower()}"
    except FileNotFoundError:
        return MISSING
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error.strerror or error}.") from error
