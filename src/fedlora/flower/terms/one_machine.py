"""Keys of a run's file that belong to one machine: a federation refuses each by name, and says what takes its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedlora.errors import ConfigError

_EACH_ITS_OWN = "each site names its own in its site.toml (fedlora flower site)"
_IN_POLICY = "who takes part, with which rank, stands in policy.toml (fedlora flower init --sites)"
_ATTACK = "clients that lie on purpose are an experiment in one process, for fedlora run; never a federation"
ELSEWHERE: dict[str, str] = {
    "data.train": f"{_EACH_ITS_OWN}. To deal one file out, for a trial, leave --sites away",
    "data.clients": f"{_EACH_ITS_OWN}",
    "data.task": f"{_EACH_ITS_OWN}; a benchmark is for fedlora run",
    "data.tasks": "it is of benchmarks, which are for fedlora run",
    "data.unseen": "it is of benchmarks, which are for fedlora run",
    "data.task_lists": "it is of benchmarks, which are for fedlora run",
    "data.max_test": "what a site holds out is data.validation and data.test; the server's file can be shortened",
    "clients.count": _IN_POLICY,
    "clients.ranks": _IN_POLICY,
    "clients.profile": _IN_POLICY,
    "clients.partition": "nothing is dealt out: each site has its own file",
    "clients.alpha": "nothing is dealt out: each site has its own file",
    "clients.min_size": "nothing is dealt out: each site has its own file",
    "clients.own_test": "what each site holds out is data.test",
    "clients.starts": "every site starts from what the server sends; own starts are for fedlora run",
    "model.remember_prefix": "it is for many runs on one machine, with fedlora run",
    "model.path": "each site names its own copy in its site.toml, and the server one in [at_server]",
    "model.device": "each machine has its own: device in a site's site.toml",
    "run.workers": "a server trains nobody, and each site trains itself",
    "run.keep_uploads": "a federation's server stores no uploads; it is for fedlora run",
    "run.checkpoint_every": "a federation's server stores every round, and could lose none",
    "run.keep_checkpoints": "a federation's server keeps the last two rounds, and the best",
    "evaluate.samples": "a federation keeps no answers of its model; it is for fedlora run",
    "server.gauge_stress": "it is an experiment with uploads, for fedlora run",
    "attack.kind": _ATTACK,
    "attack.share": _ATTACK,
    "attack.clients": _ATTACK,
    "attack.strength": _ATTACK,
    "attack.space": _ATTACK,
    "attack.noise": _ATTACK,
}


def refuse_elsewhere(raw: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for keys, in nested tables, that belong to one machine: a line for each."""
    found = []
    for name, table in raw.items():
        for key in table if isinstance(table, Mapping) else ():
            if f"{name}.{key}" in ELSEWHERE:
                found.append(elsewhere(f"{name}.{key}", table[key]))
    for part in ("validation", "test"):
        value = raw["data"].get(part) if isinstance(raw.get("data"), Mapping) else None
        if isinstance(value, str):
            found.append(
                f"data.{part} = {value!r} is a file, and what each site holds out is a share of its own; the server's "
                f"file is at_server.{part}"
            )
    if found:
        raise ConfigError("; ".join(found) + ".")


def elsewhere(key: str, value: Any) -> str:
    """What is said of such a key."""
    return f"{key} = {value!r} is of one machine, and this is a federation: {ELSEWHERE[key]}. Leave it out"


def keys_elsewhere(table: str) -> list[str]:
    """Those keys of a table."""
    return [key.split(".")[1] for key in ELSEWHERE if key.startswith(f"{table}.")]


__all__ = ["ELSEWHERE", "elsewhere", "keys_elsewhere", "refuse_elsewhere"]
