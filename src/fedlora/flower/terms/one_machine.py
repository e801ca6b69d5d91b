"""Keys of a run's file that belong to one machine: a federation refuses each by name, and names its replacement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedlora.errors import ConfigError
from fedlora.runs.config import KEYS

ELSEWHERE: dict[str, str] = {name: key.elsewhere for name, key in KEYS.items() if key.elsewhere}


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
                f"data.{part} = {value!r} is a file, but in a federation each site holds out a share of its own data; "
                f"the key for the server's file is at_server.{part}"
            )
    if found:
        raise ConfigError("; ".join(found) + ".")


def elsewhere(key: str, value: Any) -> str:
    """The message about such a key."""
    return f"{key} = {value!r} is no setting of a federation: {ELSEWHERE[key]}. Leave it out"


def keys_elsewhere(table: str) -> list[str]:
    """The keys of a table that belong to one machine."""
    return [key.split(".")[1] for key in ELSEWHERE if key.startswith(f"{table}.")]


__all__ = ["ELSEWHERE", "elsewhere", "keys_elsewhere", "refuse_elsewhere"]
