"""What "the same run" means, once: a record of a configuration's keys, without one of two named sets.

`digest` names a run's result: all keys that differ from their defaults, except `NO_NUMBER`; the user's own files by
their content. `identity` marks a run's states: it leaves out `LATER` too, and includes what was read.
A checkpoint carries it, so that a state never goes on under another configuration, seed, model or data.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

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
    "train.command", "evaluate.every", "evaluate.test_along", "evaluate.clients_at_end", "evaluate.samples",
    "privacy.budget",
}  # fmt: skip


def later(config: RunConfig) -> frozenset[str]:
    """`LATER`, without the number of rounds where each round depends on it: by the learning rate, or by the noise."""
    fixed = config.train.lr_scheduler_type != "constant" or config.privacy is not None
    return LATER - {"run.rounds"} if fixed else LATER


def digest(config: RunConfig) -> str:
    """The first 16 hexadecimal digits of SHA-256 of what a result depends on. Local files count by their names: see
    `inputs.digest_of`."""
    told = [(key, value) for key, value in _record(config) if key not in NO_NUMBER]
    return hashlib.sha256(json.dumps([MEANING, told]).encode()).hexdigest()[:16]


def identity(config: RunConfig, facts: Mapping[str, Any], secret: str = "") -> str:
    """64 hexadecimal digits, the same for every start of one run, wherever it is.

    Args:
        facts: a manifest's model, data and threads. secret: a private run's, so that nobody can confirm a guess about
            its data by this digest.
    """
    told = [(key, placeless(value)) for key, value in _record(config) if key not in later(config)]
    read = [facts["model"]["sha256"], facts["model"].get("adapter"), facts["data"], facts["threads"], secret]
    return hashlib.sha256(json.dumps([MEANING, told, read], sort_keys=True).encode()).hexdigest()


def differing(stored: RunConfig, config: RunConfig) -> Iterator[tuple[str, Any, Any]]:
    """(key, value there, value here) for keys that differ by more than the place of a file."""
    there, here = dict(_every(stored)), dict(_every(config))
    for key in dict.fromkeys((*there, *here)):
        if placeless(there.get(key)) != placeless(here.get(key)):
            yield key, there.get(key), here.get(key)


def placeless(value: Any) -> Any:
    """The value without absolute paths, for where contents are compared. The order of clients counts: it decides their
    ranks."""
    if isinstance(value, Mapping):
        return [(name, placeless(item)) for name, item in value.items()]
    return ("a file",) if isinstance(value, str) and os.path.isabs(value) else value


def _record(config: RunConfig) -> Iterable[tuple[str, Any]]:
    """Each key that differs from its default, in the order of the tables; a method's own keys by name."""
    return _dotted(config.model_dump(mode="json", exclude_defaults=True))


def _every(config: RunConfig) -> Iterable[tuple[str, Any]]:
    return _dotted(config.model_dump(mode="json"))


def _dotted(tables: Mapping[str, Mapping[str, Any] | None]) -> Iterator[tuple[str, Any]]:
    for table, keys in tables.items():
        for name, value in sorted((keys or {}).items()) if table == "method" else (keys or {}).items():
            yield f"{table}.{name}", value
