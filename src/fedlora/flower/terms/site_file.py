"""site.toml: a site's name, and its own keys, which lie over the federation's settings. Nothing of it travels.

name = "acme"
[model]
name = "/models/bert"
[data]
train = "notes.csv"     relative paths start at the file's own folder
text = "note"           a column with another name in this file
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedlora.core.text import quoted
from fedlora.data.demo import PACKAGED
from fedlora.errors import ConfigError
from fedlora.flower.terms.policy import check_site
from fedlora.given_files import read_toml
from fedlora.runs.config import located_command

OWN: Mapping[str, tuple[str, ...]] = {
    "model": ("name", "revision", "device"),
    "data": ("train", "text", "text_pair", "label", "prompt", "response", "messages"),
    "train": ("command", "timeout"), "run": ("threads",),
}  # fmt: skip
"""The keys beside `name`, by table."""


@dataclass(frozen=True)
class Site:
    """A site's own settings: its name, and the keys of `OWN` by table.

    Example:
        >>> Site("acme", {"data": {"train": "notes.csv", "text": "note"}, "model": {"name": "demo"}}).data
        'notes.csv'
    """

    name: str
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def data(self) -> str:
        """Its file of examples."""
        return str(self.own["data"]["train"])

    @property
    def model(self) -> str:
        """Its copy of the base model."""
        return str(self.own["model"]["name"])

    @classmethod
    def of(cls, raw: Mapping[str, Any], folder: Path) -> Site:
        """From the tables of site.toml, with paths made absolute from `folder`. It does not look for the files, and
        values are checked with the settings, in `FederationSettings.for_site`. Raises `ConfigError`."""
        name, tables = raw.get("name"), {table: keys for table, keys in raw.items() if table != "name"}
        if not isinstance(name, str):
            raise ConfigError("key 'name' is missing: the site's, as the server admits it")
        check_site(name)
        given = [(table, key) for table, keys in tables.items() for key in (keys if isinstance(keys, dict) else [""])]
        if odd := [f"{table}.{key}" for table, key in given if key not in OWN.get(table, ())]:
            known = "; ".join(f"[{one}] {', '.join(keys)}" for one, keys in OWN.items())
            raise ConfigError(f"{quoted(odd[0])} is no key of a site; it may set {known}, and the server all others")
        for table, key in (("data", "train"), ("model", "name")):
            if not isinstance(tables.get(table, {}).get(key), str) or not tables[table][key]:
                raise ConfigError(f"[{table}] {key} is missing")
        return cls(name, absolute(tables, folder))

    @classmethod
    def read(cls, path: Path) -> Site:
        """From site.toml. Raises `ConfigError`."""
        try:
            return cls.of(read_toml(path, "the site file"), path.parent)
        except ConfigError as error:
            raise ConfigError(f"the site file {path}: {error}.") from error


def absolute(raw: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A file's tables with the paths in them absolute; relative ones start at `folder`."""
    found = {name: dict(table) if isinstance(table, Mapping) else table for name, table in raw.items()}

    places = (("data", "train"), ("data", "validation"), ("data", "test"), ("privacy", "ledger"), ("model", "name"))
    for table, key in places:
        keys = found.get(table)
        path = keys.get(key) if isinstance(keys, dict) else None
        named = isinstance(path, str) and path and path not in PACKAGED
        there = named and (table != "model" or (folder / str(path)).exists())  # otherwise an id on the hub
        if isinstance(keys, dict) and there:
            keys[key] = str((folder / str(path)).resolve())
    train = found.get("train")
    if isinstance(train, dict) and isinstance(train.get("command"), list):
        train["command"] = located_command([str(word) for word in train["command"]], folder)
    return found
