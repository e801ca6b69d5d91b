"""Identifies what a run reads, and thus what "the same run" means.

Names are not enough: their content may have changed, and a moved file is still the same. `contents` gives digests of
the user's own files, data and model; `facts_of` is the manifest's record of everything read, once data are
distributed; `differing` compares two such records, and `there_now` makes one without loading the model. `identity`
covers configuration, seed and these facts. Checkpoints carry it in their metadata, and it starts the chain of digests
in metrics.jsonl, so another run's files are recognised whatever they are called.
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
from fedlora.data.hub import is_hub
from fedlora.errors import ConfigError, DataError
from fedlora.runs.attack_section import with_flipped_labels
from fedlora.runs.client_data import Dealt, Keep, deal
from fedlora.runs.config import KEYS, RunConfig
from fedlora.runs.idle_keys import has_no_effect
from fedlora.training.digests import file_digest, model_commit, model_content

MODEL, DATA = "the model", "the data"
_MOST_NAMED = 3
MISSING = "missing"


def facts_of(config: RunConfig, data: Dealt) -> dict[str, Any]:
    """A manifest's "model" and "data": digests of everything the run reads, with sizes for data."""
    return {"model": _model(config), "data": _data(config, data)}


def there_now(
    config: RunConfig, data_root: Path | None, label_names: Sequence[str], known: dict[str, Any] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """`facts_of` for what is there now, without tables of which something is missing; and what is missing, in words.

    Args:
        label_names: the resumed run's classes. known: data already distributed, for runs that share theirs.

    Raises:
        ConfigError, DataError: a file is there but cannot be read.
    """
    gone = [f"{key} ({path})" for key, path in own_paths(config).items() if not Path(path).exists()]
    found: dict[str, Any] = {}
    try:
        if (model := _model(config))["sha256"]:
            found["model"] = model
        elif not any(key.startswith("model.path ") for key in gone):
            gone.append(f"model.path ({config.model.path})")
    except ConfigError:  # a packaged model whose package is not installed
        gone.append(f"model.path ({config.model.path})")
    if not any(key.startswith("data.") for key in gone):
        told = config.model_dump(mode="json", include={"data", "clients", "attack", "model"})
        key = json.dumps([told, config.run.seed, list(label_names)])
        known = {} if known is None else known
        try:
            if key not in known:
                dealt, _ = dealt_out(config, data_root, label_names)
                known[key] = _data(config, dealt)
            found["data"] = known[key]
        except DataError as error:
            if not _missing(error) and not _of_the_hub(config, data_root):
                raise
            gone.append(f"the data ({str(error).splitlines()[0]})")
    return found, gone


def dealt_out(
    config: RunConfig, data_root: Path | None, label_names: Sequence[str] = (), keep: Keep | None = None
) -> tuple[Dealt, Adversary | None]:
    """The data as clients train on them, labels flipped where one lies so; and who lies. Raises as `deal`."""
    return with_liars(config, deal(config, data_root, label_names, keep))


def with_liars(config: RunConfig, data: Dealt) -> tuple[Dealt, Adversary | None]:
    """`dealt_out` of data that are dealt. Raises `ConfigError` if nobody or everybody would lie, or cannot."""
    adversary = config.attack.adversary(list(data.parts), config.run.seed)
    return replace(data, parts=with_flipped_labels(data.parts, adversary)), adversary


def differing(there: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, list[str]]:
    """What differs between two records of `facts_of`, by `MODEL` and `DATA`; only tables in `here` count."""
    found = {}
    for table, name in (("model", MODEL), ("data", DATA)):
        if table not in here:
            continue
        theirs, ours = _named(table, there.get(table) or {}), _named(table, here[table])
        each = [key for key in dict.fromkeys((*theirs, *ours)) if theirs.get(key) != ours.get(key)]
        if table == "data" and not each and there[table].get("labels") != here[table]["labels"]:
            found[name] = ["the names of the labels"]
        elif each:
            said = [_compared(key, theirs.get(key), ours.get(key)) for key in each]
            more = [] if table == "data" else [f"{len(each) - _MOST_NAMED} more"] * (len(each) > _MOST_NAMED)
            found[name] = [*(said if table == "data" else said[:_MOST_NAMED]), *more]
    return found


def _model(config: RunConfig) -> dict[str, Any]:
    place = config.model.location()
    commit = model_commit(place)
    facts: dict[str, Any] = {"path": config.model.path, "sha256": model_content(place)}
    if commit is not None:
        facts["commit"] = commit
    if config.model.adapter is not None:
        facts["adapter"] = model_content(config.model.adapter)
    return facts


def _data(config: RunConfig, data: Dealt) -> dict[str, Any]:
    own = {"own_test": {c: _size(p) for c, p in data.own_test.items()}} if config.clients.own_test else {}
    return {**data_facts(data), **own, "labels": list(data.classes)}


def data_facts(data: Dealt) -> dict[str, Any]:
    """Sizes and digests of each client's data and of the held-out sets."""
    return {
        "train": {c: _size(p) for c, p in data.parts.items()},
        "validation": _size(TextData.concat(list(data.validation.values()))),
        "test": _size(TextData.concat(list(data.test.values()))),
        "probes": {name: _size(TextData.concat(list(sets.values()))) for name, sets in data.probes.items()},
    }


def _size(data: TextData) -> dict[str, Any]:
    return {"examples": len(data), "sha256": data.digest()}


def _named(table: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a table of `facts_of`, by descriptive names."""
    if table == "model":
        parts = {"model": facts.get("sha256", {}), "adapter": facts.get("adapter", {})}
        return {f"the {part}'s {file}": digest for part, each in parts.items() for file, digest in each.items()}
    words = {"train": "the data of {!r}", "probes": "the data of {!r}", "own_test": "the own test set of {!r}"}
    found = {said.format(name): one for part, said in words.items() for name, one in facts.get(part, {}).items()}
    return found | {f"the {part} data": facts.get(part) for part in ("validation", "test")}


def _compared(what: str, there: Any, here: Any) -> str:
    if isinstance(there or here, Mapping):
        counts = [0 if facts is None else facts["examples"] for facts in (there, here)]
        return f"{what} ({counts[0]} examples there, {counts[1]} here{', other content' * (counts[0] == counts[1])})"
    return what if there and here else f"{what} ({'gone' if there else 'not there before'})"


def _missing(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, FileNotFoundError):
        error = error.__cause__
    return error is not None


def _of_the_hub(config: RunConfig, data_root: Path | None) -> bool:
    """Whether some data come from the hub, which may be unreachable."""
    data = config.data
    each = (data.train, *data.clients.values(), data.validation, data.test)
    return (data.task is not None and data_root is None) or any(isinstance(d, str) and is_hub(d) for d in each)


# ---- the same run ----------------------------------------------------------------------------------------------------


def identity(config: RunConfig, facts: Mapping[str, Any], secret: str = "") -> str:
    """64 hexadecimal digits, the same for every start of one run, wherever it is and however many rounds it has.

    Args:
        facts: a manifest's model, data and threads. secret: a private run's, so that nobody can use this digest
            to confirm a guess about its data.
    """
    lasting = {}
    for table, keys in config.model_dump(mode="json", exclude_defaults=True).items():
        for name, value in (keys or {}).items():
            key = f"{table}.{name}"  # run.rounds is handled below
            if is_lasting(key) and key != "run.rounds" and not has_no_effect(config, key):
                lasting[key] = placeless(value)
    if config.train.schedule != "constant" or config.privacy is not None:  # each round then depends on their number
        lasting["run.rounds"] = config.run.rounds
    told = [lasting, facts["model"]["sha256"], facts["data"], facts["threads"], secret]
    told += [facts["model"]["adapter"]] if "adapter" in facts["model"] else []
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def placeless(value: Any) -> Any:
    """The value without absolute paths: digests compare what lies there. The order of clients counts."""
    if isinstance(value, Mapping):
        return [(name, placeless(item)) for name, item in value.items()]
    return ("a file",) if isinstance(value, str) and os.path.isabs(value) else value


def is_lasting(key: str) -> bool:
    """Whether a run cannot continue with another value; this includes all of a method's hyper-parameters."""
    return key not in KEYS or KEYS[key].lasting == "always"


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
        "model.path": config.model.path,
        "model.adapter": config.model.adapter,
    }
    return {key: path for key, path in told.items() if isinstance(path, str) and os.path.isabs(path)}


def with_paths(config: RunConfig, new: Mapping[str, str]) -> RunConfig:
    """The configuration with these keys' paths replaced."""
    data, model = config.data, config.model
    parts = {part: new[f"data.{part}"] for part in ("train", "validation", "test") if f"data.{part}" in new}
    clients = {client: new.get(f"data.clients.{client}", path) for client, path in data.clients.items()}
    lists = [new.get(f"data.task_lists.{k}", path) for k, path in enumerate(data.task_lists)]
    return config.model_copy(
        update={
            "data": data.model_copy(update={**parts, "clients": clients, "task_lists": lists}),
            "model": model.model_copy(
                update={key: new.get(f"model.{key}", getattr(model, key)) for key in ("path", "adapter")}
            ),
        }
    )


def named(config: RunConfig) -> RunConfig:
    """The configuration with the user's own files given by name only."""
    return with_paths(config, {key: Path(path).name for key, path in own_paths(config).items()})


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
