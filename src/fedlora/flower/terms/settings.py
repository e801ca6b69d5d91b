"""federation.toml: a run's TOML with an id and the table [network]; and site.toml, which overlays a site's own keys.

    id = "fed-4f21c0"       made once; sites keep their state by it
    [network]               the server's address
    [model] [data] [lora] [method] [server] [robust] [privacy] [train] [run] [evaluate]      as in a run's file

model.name is the server's copy of the base model, and a *file* in data.validation or data.test is the server's; a
*share* there is what each site holds out of its own. Every message carries the settings to the sites, without what
belongs to the server's machine. Keys that only `fedlora run` uses (workers, checkpoints, samples) have no effect here.

    name = "acme"           site.toml: the keys of `OWN`, over the server's
    [model]
    name = "/models/bert"
    [data]
    train = "notes.csv"     relative paths start at the file's own folder
    text = "note"           a column with another name in this file
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from fedlora.core.text import quoted
from fedlora.data.demo import PACKAGED
from fedlora.data.hub import is_hub
from fedlora.errors import ConfigError
from fedlora.flower.terms.policy import check_site
from fedlora.flower.terms.privacy import FederationPrivacy, refusals, with_private_defaults
from fedlora.given_files import read_toml
from fedlora.runs.config import RunConfig, located_command
from fedlora.runs.data_sections import DataSection
from fedlora.runs.reading import checked
from fedlora.training.settings import Section

Held = Annotated[float, Field(ge=0, lt=1)]
Port = Annotated[int, Field(ge=1, le=65535)]
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PARTS = ("validation", "test")
UNNAMED = "each site's own"  # model.name and data.train where nobody has named one

OWN: Mapping[str, tuple[str, ...]] = {
    "model": ("name", "revision", "device"),
    "data": ("train", "text", "text_pair", "label", "prompt", "response", "messages"),
    "train": ("command", "timeout"), "run": ("threads",), "method": ("name",),
}  # fmt: skip
"""The keys of site.toml beside `name`, by table."""

# What never travels, by table; None: the whole table. A server that sends one of these is refused.
_STAYS: dict[str, tuple[str, ...] | None] = {
    "network": None, "at_server": None, "clients": None, "attack": None,
    "model": ("name", "revision", "device", "adapter"),
    "data": ("train", "clients", "task", "revision", "tasks", "unseen_tasks", "task_lists", "max_test"),
    "train": ("command", "timeout"), "run": ("workers", "report_to"), "privacy": ("ledger",),
}  # fmt: skip

# What a site's trainer takes from the settings; quorum, participation and stopping are the server's.
_OF_SITES: dict[str, Any] = {
    **dict.fromkeys(("model", "data", "lora", "method", "train"), True), "server": {"heads"},
    "run": {"rounds", "seed", "threads"}, "evaluate": {"metric", "max_new_tokens", "batch_size"},
}  # fmt: skip

# Keys of a run's file that would mean something else than a reader expects, and what a federation has instead.
_ELSEWHERE = {
    **dict.fromkeys(("data.train", "data.clients"), "each site names its file in its site.toml"),
    **dict.fromkeys(("train.command", "train.timeout", "model.device"), "each site sets it in its site.toml"),
    **dict.fromkeys(
        ("data.task", "attack", "server.gauge_stress", "run.readouts", "run.keep_uploads", "evaluate.test_along"),
        "it is for `fedlora run`",
    ),
    "clients": "policy.toml says who takes part, with which rank (fedlora flower init --sites)",
    "model.adapter": "fedlora flower init --start names a start",
    "at_server": "data.validation and data.test may name a file of the server's",
}


class NetworkSection(Section):
    """name, port: where sites connect, which is the proxy. superlink_port: the SuperLink's, on loopback; if the two
    ports are one, there is no proxy between, and only this machine's sites reach it (`fedlora flower up`)."""

    name: str = "localhost"
    port: Port = 443
    superlink_port: Port = 18080


class SitesData(DataSection):
    """As [data] of a run. validation, test: the shares that each site holds out of its own file."""

    validation: Held = 0.1
    test: Held = 0.1

    @model_validator(mode="after")
    def _leaves_some(self) -> SitesData:
        if self.validation + self.test >= 1:
            raise ValueError(
                f"data.validation = {self.validation:g} and data.test = {self.test:g} leave a site nothing to train on"
            )
        return self


class AtServerSection(Section):
    """The server's own base model, and its files to measure on: read out of model.name, data.validation, data.test."""

    model: str | None = None
    validation: str | None = None
    test: str | None = None


class FederationSettings(RunConfig):
    """All settings that server and sites share, and the server's own.

    Example:
        >>> settings = FederationSettings(
        ...     id="fed-1", data={"label_names": ["no", "yes"]}, lora={"target_modules": ["q_proj"]}
        ... )
        >>> FederationSettings.from_travelling(settings.travelling()).data.label_names
        ['no', 'yes']
    """

    id: str
    network: NetworkSection = NetworkSection()
    at_server: AtServerSection = AtServerSection()
    data: SitesData = SitesData(train=UNNAMED)
    privacy: FederationPrivacy | None = None

    @model_validator(mode="before")
    @classmethod
    def _sites_name_their_own(cls, raw: Any) -> Any:
        """A run's tables without model and data, which each machine has its own; a file to measure on is the server's,
        and then no site holds anything out for it."""
        if not isinstance(raw, Mapping) or not all(
            isinstance(raw.get(key, {}), Mapping) for key in ("model", "data", "at_server")
        ):
            return raw
        raw = with_private_defaults(raw)
        model, data = dict(raw.get("model", {})), dict(raw.get("data", {}))
        files = {part: data[part] for part in _PARTS if isinstance(data.get(part), str)}
        here = {"model": model.get("name"), **files, **raw.get("at_server", {})}
        model.setdefault("name", UNNAMED)
        data = {"train": UNNAMED, **data, **dict.fromkeys(files, 0.0)}
        return {**raw, "model": model, "data": data, "at_server": here}

    @field_validator("id")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        if not _ID.fullmatch(name):
            raise ValueError("a federation's id is up to 64 letters, digits, '.', '_' and '-'; `init` makes one")
        return name

    @model_validator(mode="after")
    def _whole(self) -> FederationSettings:
        if self.model.task == "sequence-classification" and not self.data.label_names:
            raise ValueError(
                "data.label_names is missing: the names of the classes, in the order of their numbers. They are needed "
                "here because no site's file has to hold all classes (fedlora flower init --labels no,yes)"
            )
        return self

    # ------------------------------------------------------------------------------------------------- there and back

    @classmethod
    def of(cls, raw: Mapping[str, Any], folder: Path) -> FederationSettings:
        """The server's settings from a file's tables, its paths made absolute from `folder`. Raises `ConfigError` for
        each mistake, and for keys that belong to a site or to `fedlora run`."""
        given = [f"{table}.{key}" for table, keys in raw.items() if isinstance(keys, Mapping) for key in keys]
        if wrong := [key for key in (*raw, *given) if key in _ELSEWHERE]:
            said = "; ".join(f"{key} is no setting of a federation: {_ELSEWHERE[key]}" for key in wrong)
            raise ConfigError(f"{said}. Leave it out.")
        found = checked(cls, absolute(raw, folder))
        if (found.at_server.validation or found.at_server.test) and found.at_server.model is None:
            raise ConfigError("measuring on a file of the server's needs the base model: name it in model.name.")
        if found.privacy is not None:
            if refused := list(refusals(found)):
                raise ConfigError("; ".join(refused))
            found.privacy.checked()
        return found

    @classmethod
    def load(cls, path: Path) -> FederationSettings:
        """From federation.toml. Raises `ConfigError`."""
        if not path.exists():
            raise ConfigError(f"{path.parent} is no folder of `fedlora flower init`: it has no {path.name}.")
        try:
            return cls.of(read_toml(path, "the federation's settings"), path.parent)
        except ConfigError as error:
            raise ConfigError(f"the federation's settings {path}: {error}") from error

    def travelling(self) -> str:
        """The settings for sites, as canonical JSON, without `_STAYS`. Defaults are included, because another version
        may have others."""
        beside = {table: True if keys is None else {*keys} for table, keys in _STAYS.items()}
        return json.dumps(self.model_dump(mode="json", exclude=beside), sort_keys=True)

    @classmethod
    def from_travelling(cls, text: str) -> FederationSettings:
        """Settings from a site's message. Raises `ConfigError`, also for what no server may set at a site."""
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the server's settings are not JSON: {error}.") from error
        if not isinstance(raw, dict):
            raise ConfigError("the server's settings are not a table.")
        for table, keys in _STAYS.items():
            there = raw.get(table)
            if odd := [key for key in keys or () if isinstance(there, dict) and key in there]:
                raise ConfigError(f"the server's settings set {table}.{odd[0]}, which is a site's own.")
            if keys is None and table in raw:
                raise ConfigError(f"the server's settings have a table [{table}], which does not travel.")
        try:
            return checked(cls, raw)
        except ConfigError as error:
            raise ConfigError(
                f"the server's settings cannot be read here: {error}. Does the server run another version of fedlora? "
                f"(fedlora doctor lists the versions)"
            ) from error

    # -------------------------------------------------------------------------------------------------- what it means

    def for_site(self, site: Site, rank: int = 1) -> RunConfig:
        """The input of `runs.preparation.prepare` for a site's trainer: the settings with its own keys over them.

        Raises:
            ConfigError: a mistake in site.toml; a module chosen by the server, because importing it here would run it.
        """
        own = {table: dict(keys) for table, keys in site.own.items()}
        if ":" in self.method.name and own.get("method", {}).get("name") != self.method.name:
            raise ConfigError(
                f"the server's method {quoted(self.method.name)} is a class in a module of its choice, and importing a "
                f"module runs it. Nothing was imported. If {site.name} has that module and wants to run it, set "
                f"[method] name = {quoted(self.method.name)} in site.toml."
            )
        own.pop("method", None)
        said = self.model_dump(exclude_defaults=True, include=_OF_SITES)
        data = {key: value for key, value in said.get("data", {}).items() if key != "train"}
        mine = own.get("data", {})
        for these, others in ((("messages",), ("prompt", "response")), (("prompt", "response"), ("messages",))):
            if any(key in mine for key in these):  # one form of rows stands in place of the other
                data = {key: value for key, value in data.items() if key not in others}
        data |= {key: value for key, value in mine.items() if key != "train"}
        data["clients"] = {site.name: mine.get("train", UNNAMED)}
        train = own.get("train", {}) if "command" in own.get("train", {}) else said.get("train", {})
        if not self.data.validation and not self.data.test:
            said.pop("evaluate", None)
        tables = {
            **said, "data": data, "train": train, "clients": {"ranks": [rank]},
            "model": {**said.get("model", {}), **own.get("model", {})},
            "run": {**said.get("run", {}), **own.get("run", {})},
        }  # fmt: skip
        try:
            return checked(RunConfig, tables)
        except ConfigError as error:
            raise ConfigError(f"site.toml of {site.name}, over the server's settings: {error}.") from error

    def for_server(self) -> RunConfig | None:
        """The same for measuring, with the server's base model and its files; None if it has none to measure on."""
        here = self.at_server
        files = {part: getattr(here, part) or 0.0 for part in _PARTS}
        if not any(files.values()):
            return None
        return self.as_run(str(here.model), **files)

    def as_run(self, model: str, **data: Any) -> RunConfig:
        """The federation as one run with that base model, as its adapters' cards and its measurements take it. data:
        further keys of [data]."""
        config = self.for_site(Site("server", {"model": {"name": model}, "method": {"name": self.method.name}}))
        return config.model_copy(
            update={
                "data": config.data.model_copy(update=data), "evaluate": self.evaluate, "robust": self.robust,
            }
        )  # fmt: skip


@dataclass(frozen=True)
class Site:
    """A site's own settings: its name, and the keys of `OWN` by table. Nothing of this travels.

    Example:
        >>> Site("acme", {"data": {"train": "notes.csv", "text": "note"}, "model": {"name": "demo"}}).data
        'notes.csv'
    """

    name: str
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def data(self) -> str:
        """Its file of examples, or a data set "hf://..."."""
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
        for table, keys in tables.items():
            odd = (
                [f"{table}.{key}" for key in keys if key not in OWN.get(table, ())]
                if isinstance(keys, dict)
                else [table]
            )
            if odd or table not in OWN:
                known = "; ".join(f"[{one}] {', '.join(keys)}" for one, keys in OWN.items())
                raise ConfigError(f"{quoted(odd[0] if odd else table)} is no key of a site, which may set {known}. All "
                                  f"other settings come from the server")  # fmt: skip
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

    for table, key in (*(("data", part) for part in ("train", *_PARTS)), ("privacy", "ledger"), ("model", "name")):
        keys = found.get(table)
        path = keys.get(key) if isinstance(keys, dict) else None
        named = isinstance(path, str) and path and not is_hub(path) and path not in PACKAGED
        there = named and (table != "model" or (folder / str(path)).exists())  # otherwise an id on the hub
        if isinstance(keys, dict) and there:
            keys[key] = str((folder / str(path)).resolve())
    train = found.get("train")
    if isinstance(train, dict) and isinstance(train.get("command"), list):
        train["command"] = located_command([str(word) for word in train["command"]], folder)
    return found


__all__ = ["OWN", "UNNAMED", "FederationSettings", "NetworkSection", "Site", "absolute"]
