"""What "the same run" means, once: a record of a configuration's keys, without one of two named sets.

`digest` names a run's result: all keys that differ from their defaults, except `NO_NUMBER`; the user's own files by
their content (`digest_of`). `identity` marks a run's states: it leaves out `LATER` too, and includes what was read.
A checkpoint carries it, so that a state never goes on under another configuration, seed, model or data.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlora.data.hub import file_digest
from fedlora.errors import ConfigError
from fedlora.training.digests import model_content

if TYPE_CHECKING:
    from fedlora.runs.config import RunConfig

MEANING = 1  # raised when a default or the meaning of a key changes, so that old results do not stand for new runs
NO_NUMBER = frozenset({  # keys that change no number of a result
    "run.workers", "run.report_to", "run.checkpoint_every", "run.keep_checkpoints", "run.keep_uploads", "run.readouts",
    "train.timeout",
})  # fmt: skip
LATER = NO_NUMBER | {  # keys that may change on resume: they concern the end, or the rounds from then on
    "run.rounds",
    "run.threads", "data.chat_template",  # compared as they take effect, in the facts
    "train.command", "evaluate.every", "evaluate.clients_at_end", "evaluate.samples",
    "privacy.budget",
}  # fmt: skip


def later(config: RunConfig) -> frozenset[str]:
    """`LATER`, without the number of rounds where each round depends on it: by the learning rate, or by the noise."""
    fixed = config.train.lr_scheduler_type != "constant" or config.privacy is not None
    return LATER - {"run.rounds"} if fixed else LATER


def digest(config: RunConfig) -> str:
    """The first 16 hexadecimal digits of SHA-256 of what a result depends on. Local files count by their names."""
    kept = [(key, value) for key, value in _record(config, exclude_defaults=True) if key not in NO_NUMBER]
    return hashlib.sha256(json.dumps([MEANING, kept]).encode()).hexdigest()[:16]


def digest_of(config: RunConfig) -> str:
    """The digest with the user's own files identified by content: they may move. Raises `ConfigError` if one cannot be
    read."""
    return digest(with_files(config, _content))


def identity(config: RunConfig, facts: Mapping[str, Any], secret: str = "") -> str:
    """64 hexadecimal digits, the same for every start of one run, wherever it is.

    Args:
        facts: a manifest's model, data and threads. secret: a private run's, so that nobody can confirm a guess about
            its data by this digest.
    """
    kept = [
        (key, placeless(value)) for key, value in _record(config, exclude_defaults=True) if key not in later(config)
    ]
    read = [facts["model"]["sha256"], facts["model"].get("adapter"), facts["data"], facts["threads"], secret]
    return hashlib.sha256(json.dumps([MEANING, kept, read]).encode()).hexdigest()


def differing(stored: RunConfig, config: RunConfig) -> Iterator[tuple[str, Any, Any]]:
    """(key, value there, value here) for keys that differ by more than the place of a file."""
    there, here = dict(_record(stored)), dict(_record(config))
    for key in dict.fromkeys((*there, *here)):
        if placeless(there.get(key)) != placeless(here.get(key)):
            yield key, there.get(key), here.get(key)


def placeless(value: Any) -> Any:
    """The value without absolute paths, for where contents are compared. The order of clients counts: it decides their
    ranks."""
    if isinstance(value, Mapping):
        return [(name, placeless(item)) for name, item in value.items()]
    return ("a file",) if isinstance(value, str) and os.path.isabs(value) else value


def _record(config: RunConfig, *, exclude_defaults: bool = False) -> Iterator[tuple[str, Any]]:
    """Each key with its value, in the order of the tables; a method's own keys by name."""
    for table, keys in config.model_dump(mode="json", exclude_defaults=exclude_defaults).items():
        for name, value in sorted((keys or {}).items()) if table == "method" else (keys or {}).items():
            yield f"{table}.{name}", value


# ---- the user's own files --------------------------------------------------------------------------------------------


def with_files(config: RunConfig, put: Callable[[str, str], str]) -> RunConfig:
    """The configuration with put(key, path) for each of the user's own files and folders: the absolute paths left by
    `config.located`."""

    def own(key: str, value: Any) -> Any:
        return put(key, value) if isinstance(value, str) and os.path.isabs(value) else value

    data, model = config.data, config.model
    parts: dict[str, Any] = {part: own(f"data.{part}", getattr(data, part)) for part in ("train", "validation", "test")}
    parts["clients"] = {client: own(f"data.clients.{client}", path) for client, path in data.clients.items()}
    parts["task_lists"] = [own(f"data.task_lists.{k}", path) for k, path in enumerate(data.task_lists)]
    there = {key: own(f"model.{key}", getattr(model, key)) for key in ("name", "adapter")}
    return config.model_copy(update={"data": data.model_copy(update=parts), "model": model.model_copy(update=there)})


def own_files(config: RunConfig) -> dict[str, Path]:
    """Key -> path of each of the user's own files and folders."""
    found: dict[str, str] = {}
    with_files(config, found.setdefault)
    return {key: Path(path) for key, path in found.items()}


def _content(key: str, path: str) -> str:
    """SHA-256 of the file, plus its suffix, which decides how it is read; "missing" if it is not there."""
    try:
        if Path(path).is_dir():
            digests = json.dumps(model_content(path), sort_keys=True)  # as in the run's manifest
            return hashlib.sha256(digests.encode()).hexdigest()
        return f"{file_digest(Path(path))}{Path(path).suffix.lower()}"
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error.strerror or error}.") from error
