"""federation.toml: a federation's agreed settings. The server holds them; every message carries what sites need.

id = "fed-4f21c0"       made once; sites keep their state by it
[network] [at_server]   only the server's
[model] [data] [lora] [method] [server] [defence] [privacy] [train] [run] [evaluate]    as in a run's file, without keys
                        that belong to one machine: paths, the partition of one file, worker processes
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from pydantic import Field, field_validator, model_validator

from fedlora.core.text import quoted
from fedlora.data.demo import PACKAGED
from fedlora.data.hub import is_hub
from fedlora.errors import ConfigError
from fedlora.flower.terms.one_machine import keys_elsewhere, refuse_elsewhere
from fedlora.flower.terms.privacy import FederationPrivacy, refusals, with_private_defaults
from fedlora.flower.terms.site_file import Site
from fedlora.given_files import read_toml
from fedlora.runs.config import RunConfig
from fedlora.runs.data_sections import ClassNames
from fedlora.runs.defence import DefenceSection
from fedlora.runs.reading import checked
from fedlora.runs.sections import EvaluateSection, MethodSection, RunSection, ServerSection
from fedlora.training.settings import LoRASettings, Positive, Section, Task, TrainSection
from fedlora.training.templates import check_template

Held = Annotated[float, Field(ge=0, lt=1)]
Port = Annotated[int, Field(ge=1, le=65535)]
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

# What a site's trainer takes from the settings; quorum, participation and stopping are the server's.
_OF_SITES: dict[str, Any] = {
    **dict.fromkeys(("model", "data", "lora", "method", "train"), True), "server": {"heads"},
    "run": {"rounds", "seed", "threads"}, "evaluate": {"metric", "max_new_tokens", "batch_size"},
}  # fmt: skip

# A column of a site's own file -> the settings' columns that it stands in place of.
_REPLACES = {"messages": ("prompt", "response"), "prompt": ("messages",), "response": ("messages",)}

_HEAD = """\
# What server and sites agree on. Sites receive it with every message: edit it here, and nowhere else.
# After the first round only run.rounds may change, [network], and the paths of [at_server].

"""


class NetworkSection(Section):
    """name, port: the proxy's address for sites; without a name, this is a trial on one machine. superlink_port: the
    SuperLink's, on loopback."""

    name: str | None = None
    port: Port = 443
    superlink_port: Port = 18080


class AtServerSection(Section):
    """The server's own base model and files to measure on, if it has them. They never travel."""

    model: str | None = None
    validation: str | None = None
    test: str | None = None

    @model_validator(mode="after")
    def _a_model_to_measure(self) -> AtServerSection:
        if (self.validation or self.test) and not self.model:
            raise ValueError(
                "measuring at_server.validation and at_server.test needs a base model: give at_server.model too, or "
                "leave them out"
            )
        return self


class AgreedModel(Section):
    """As [model] of a run, without the path, which each machine sets itself."""

    task: Task = "classification"
    bf16: bool = False
    four_bit: bool = False
    checkpointing: bool = False
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None


class AgreedData(Section):
    """As [data] of a run, without its sources. labels: the classes, in the order of their numbers. validation, test:
    shares that each site holds out from its own file. max_train: the most examples for each site."""

    labels: ClassNames | None = None
    max_length: Positive = 128
    max_train: Positive | None = None
    template: str | None = None
    text: str = "text"
    pair: str | None = None
    label: str = "label"
    prompt: str = "prompt"
    response: str = "response"
    messages: str | None = None
    validation: Held = 0.1
    test: Held = 0.1

    @model_validator(mode="after")
    def _leaves_some(self) -> AgreedData:
        if self.validation + self.test >= 1:
            raise ValueError(
                f"data.validation = {self.validation:g} and data.test = {self.test:g} leave a site nothing to train on"
            )
        check_template(self.template)
        return self


class FederationSettings(Section):
    """All settings that server and sites share, and the server's own.

    Example:
        >>> settings = FederationSettings(id="fed-1", data={"labels": ["no", "yes"]}, lora={"targets": ["q_proj"]})
        >>> FederationSettings.from_travelling(settings.travelling()).data.labels
        ['no', 'yes']
    """

    id: str
    network: NetworkSection = NetworkSection()
    at_server: AtServerSection = AtServerSection()
    model: AgreedModel = AgreedModel()
    data: AgreedData = AgreedData()
    lora: LoRASettings = LoRASettings()
    method: MethodSection = MethodSection()
    server: ServerSection = ServerSection()
    defence: DefenceSection = DefenceSection()
    train: TrainSection = TrainSection()
    run: RunSection = RunSection()
    evaluate: EvaluateSection = EvaluateSection()
    privacy: FederationPrivacy | None = None

    @model_validator(mode="before")
    @classmethod
    def _private_defaults(cls, raw: Any) -> Any:
        return with_private_defaults(raw)

    @field_validator("id")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        if not _ID.fullmatch(name):
            raise ValueError("a federation's id is up to 64 letters, digits, '.', '_' and '-'; `init` makes one")
        return name

    @model_validator(mode="after")
    def _whole(self) -> FederationSettings:
        if self.model.task == "classification" and not self.data.labels:
            raise ValueError(
                "data.labels is missing: the names of the classes, in the order of their numbers. They are needed here "
                "because no site's file has to hold all classes (fedlora flower init --labels no,yes)"
            )
        return self

    def check(self) -> FederationSettings:
        """The settings, if no two keys contradict each other; for the server, whose own tables do not travel.

        Raises:
            ConfigError: two do.
        """
        if self.privacy is not None and (wrong := list(refusals(self))):
            raise ConfigError("; ".join(wrong))
        return self

    # ------------------------------------------------------------------------------------------------- there and back

    def travelling(self) -> str:
        """The settings for sites, as canonical JSON: all but [network] and [at_server]. Defaults are included, because
        another version may have others. [privacy] is without the ledger's path."""
        beside: dict[str, Any] = {"network": True, "at_server": True, "privacy": {"ledger"}}
        return json.dumps(self.model_dump(mode="json", exclude=beside), sort_keys=True)

    @classmethod
    def from_travelling(cls, text: str) -> FederationSettings:
        """Settings from a site's message. Raises `ConfigError`."""
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the server's settings are not JSON: {error}.") from error
        if not isinstance(raw, dict) or {"network", "at_server"} & set(raw):
            raise ConfigError("the server's settings are not of the form that travels to sites.")
        try:
            return checked(cls, raw)
        except ConfigError as error:
            raise ConfigError(
                f"the server's settings cannot be read here: {error}. Does the server run another version of fedlora? "
                f"(fedlora doctor lists the versions)"
            ) from error

    @classmethod
    def load(cls, path: Path) -> FederationSettings:
        """From federation.toml, with the server's own paths made absolute. Raises `ConfigError`."""
        if not path.exists():
            raise ConfigError(f"{path.parent} is no folder of `fedlora flower init`: it has no {path.name}.")
        raw = read_toml(path, "the federation's settings")
        refuse_elsewhere(raw)
        try:
            found = checked(cls, raw).check().located(path.parent)
            if found.privacy is not None:
                found.privacy.checked()
            return found
        except ConfigError as error:
            raise ConfigError(f"the federation's settings {path}: {error}.") from error

    def toml(self) -> str:
        """The text of federation.toml, with every key that can be set."""
        without = {name: set(keys_elsewhere(name)) for name in type(self).model_fields}
        return _HEAD + tomli_w.dumps(self.model_dump(mode="json", exclude=without, exclude_none=True))

    def located(self, folder: Path) -> FederationSettings:
        """The settings with the server's own paths absolute; relative ones start at `folder`."""
        here, changes = self.at_server, {}
        for part in ("validation", "test"):
            path = getattr(here, part)
            if path and not is_hub(path):
                changes[part] = str((folder / path).resolve())
        if here.model and here.model not in PACKAGED and (folder / here.model).exists():
            changes["model"] = str((folder / here.model).resolve())
        private = self.privacy
        if private is not None and private.ledger:
            private = private.model_copy(update={"ledger": str((folder / private.ledger).resolve())})
        return self.model_copy(update={"at_server": here.model_copy(update=changes), "privacy": private})

    # -------------------------------------------------------------------------------------------------- what it means

    def for_site(self, site: Site, rank: int = 1) -> RunConfig:
        """The input of `runs.preparation.prepare` for a site's trainer: its own file and model, everything else as
        agreed.

        The site's columns take precedence. The other members, quorum and stopping are up to the server.

        Raises:
            ConfigError: a module chosen by the server, because importing
                it here would run it.
        """
        if ":" in self.method.name and self.method.name != site.method:
            raise ConfigError(
                f"the server's method {quoted(self.method.name)} is a class in a module of its choice, and importing a "
                f"module runs it. Nothing was imported. If {site.name} has that module and wants to run it, set method "
                f"= {quoted(self.method.name)} in site.toml."
            )
        return self._config(site, rank)

    def for_server(self) -> RunConfig | None:
        """The same for measuring, with the server's own model and held-out files; None without [at_server] model."""
        here = self.at_server
        if not here.model:
            return None
        path = here.validation or here.test
        config = self._config(Site(name="server", data=path or "nothing", model=here.model))
        data = config.data.model_copy(update={"validation": here.validation or 0.0, "test": here.test or 0.0})
        return config.model_copy(update={"data": data, "evaluate": self.evaluate})

    def _config(self, site: Site, rank: int = 1) -> RunConfig:
        said = self.model_dump(exclude_defaults=True, include=_OF_SITES)
        columns, device = site.columns, {"device": site.device} if site.device else {}
        replaced = {other for column in columns for other in _REPLACES.get(column, ())}
        agreed = {key: value for key, value in said.get("data", {}).items() if key not in replaced}
        if not self.data.validation and not self.data.test:
            said.pop("evaluate", None)
        return checked(
            RunConfig,
            {
                **said,
                "model": {**said.get("model", {}), "path": site.model, **device},
                "data": {**agreed, **columns, "clients": {site.name: site.data}},
                "clients": {"ranks": [rank]},
                "train": said.get("train", {}) if site.command is None else site.program,
                "run": {**said.get("run", {}), **({"threads": site.threads} if site.threads else {})},
            },
        )


__all__ = ["AgreedData", "AgreedModel", "AtServerSection", "FederationSettings", "NetworkSection"]
