"""A run's configuration: TOML in, one frozen value out, canonical JSON and a digest of it.

Every key is a field of one of `sections`, with its default; an unknown one is an error that names the nearest. `--set
a.b=c` on the command line sets the same key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, model_validator

from fedlora.data.demo import PACKAGED
from fedlora.data.sources import is_hub
from fedlora.errors import ConfigError
from fedlora.given_files import parse_toml, read_toml
from fedlora.runs.attack_section import AttackSection
from fedlora.runs.defence import DefenceSection
from fedlora.runs.privacy_section import SIMULATED, PrivacySection, with_private_server
from fedlora.runs.reading import checked
from fedlora.runs.sections import (
    ClientsSection,
    DataSection,
    EvaluateSection,
    MethodSection,
    ModelSection,
    RunSection,
    ServerSection,
)
from fedlora.runs.unused import unused
from fedlora.server.terms import weighs_by
from fedlora.training.prompting import RAW
from fedlora.training.settings import LoRASettings, Section, TrainSection

# Defaults as they were when the first runs were stored, where they have changed since: digests are told against these.
FORMER_DEFAULTS = {("train", "lr"): 1e-3, ("train", "accumulation"): 1, ("server", "weighting"): "examples"}


class RunConfig(Section):
    """A whole run.

    Example:
        >>> config = load_config(Path("config.toml"))
        >>> config.method.name, config.run.rounds
        ('glora', 3)
    """

    model: ModelSection
    data: DataSection
    run: RunSection = RunSection()
    lora: LoRASettings = LoRASettings()
    method: MethodSection = MethodSection()
    server: ServerSection = ServerSection()
    defence: DefenceSection = DefenceSection()
    clients: ClientsSection = ClientsSection()
    train: TrainSection = TrainSection()
    evaluate: EvaluateSection = EvaluateSection()
    attack: AttackSection = AttackSection()
    privacy: PrivacySection | None = None

    @model_validator(mode="before")
    @classmethod
    def _private_server(cls, raw: Any) -> Any:
        return with_private_server(raw)

    def canonical(self) -> str:
        """The same JSON for the same configuration, with every field."""
        fields = self.model_dump(mode="json")
        fields["method"] = dict(sorted(fields["method"].items()))
        return json.dumps(fields)  # in the order of the fields; that of data.clients says who gets which rank

    def digest(self) -> str:
        """SHA-256 (first 16 hex digits) of what differs from the defaults: a new key leaves old digests alone, and so
        does a new default of an old key.

        A language model's template is in it unless it is "none": so were all runs prompted before there was the key.
        run.workers does not count: it changes no bit. What its one thread does is in the manifest. Nor does
        model.remember_prefix: the same training up to rounding, as on another processor. Results say whether it was on.
        """
        fields = self.model_dump(mode="json", exclude_defaults=True)
        if self.model.task == "causal-lm":
            fields["data"].pop("template", None)
            if self.data.prompting() != RAW:
                fields["data"]["template"] = self.data.prompting()
        fields.get("run", {}).pop("workers", None)
        fields.get("model", {}).pop("remember_prefix", None)
        for (table, key), former in FORMER_DEFAULTS.items():
            section: BaseModel = getattr(self, table)
            value = getattr(section, key)
            if key == "weighting":  # what counts, said or not
                value = weighs_by(value, self.defence.rule != "none")
            told = {**fields.pop(table, {}), key: value}
            if told[key] == former:
                del told[key]
            if told:
                fields[table] = {name: told[name] for name in type(section).model_fields if name in told}
        fields = {table: fields[table] for table in type(self).model_fields if fields.get(table)}
        fields["method"] = {"name": self.method.name, **dict(sorted(fields.get("method", {}).items()))}
        return hashlib.sha256(json.dumps(fields).encode()).hexdigest()[:16]


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration in a TOML file, with `a.b=c` overrides applied; its data paths made absolute.

    Raises:
        ConfigError: no such file, no TOML, an unknown key, a wrong type or an impossible value: one line each.

    Example:
        >>> load_config(Path("config.toml"), ["run.rounds=1", "method.name=svd"]).method.name
        'svd'
    """
    raw = read_toml(path, "the config")
    for override in overrides:
        override_in(raw, override)
    config = parse_config(raw)
    if config.privacy is not None and config.privacy.population == SIMULATED:
        raise ConfigError(
            f"privacy.population = {SIMULATED!r} is what an experiment calls clients that it simulates, a population "
            f"for each run. This run's clients are somebody: name whose data these are."
        )
    return located(config, path.parent)


def parse_config(raw: dict[str, Any]) -> RunConfig:
    """A configuration from nested tables. Raises `ConfigError` with a line for each thing wrong."""
    config = checked(RunConfig, raw)
    idle = unused(config)
    if idle:
        raise ConfigError("; ".join(dict.fromkeys(idle)) + ". Leave it out.")
    return config


def overridden(overrides: Sequence[str]) -> dict[str, Any]:
    """What `a.b=c` overrides say by themselves, as nested tables. Raises `ConfigError`."""
    said: dict[str, Any] = {}
    for override in overrides:
        override_in(said, override)
    return said


def override_in(raw: dict[str, Any], text: str) -> None:
    """Set one `a.b=c` in nested tables. Raises `ConfigError`."""
    key, found, value = text.partition("=")
    if not found or not all(key.split(".")):
        raise ConfigError(f"--set takes KEY=VALUE with dots in KEY, such as run.rounds=5; got {text!r}.")
    parsed = typed(value, f"--set {text!r}")
    *path, last = key.strip().split(".")
    table = raw
    for part in path:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {text}: {part!r} is a value, not a table.")
    table[last] = parsed


def typed(text: str, where: str) -> Any:
    """What is typed behind KEY=, as a value of TOML; a bare word is a string. where: in words, for `ConfigError`."""
    try:
        said = parse_toml(f"value = {text}")
    except ValueError:
        return text
    if more := [key for key in said if key != "value"]:
        raise ConfigError(
            f"{where} is more than one value: a line in it sets {', '.join(map(repr, more))} as well, which would be "
            f"lost. Give each key by itself; a text of several lines stands in quotes."
        )
    return said["value"]


def located(config: RunConfig, folder: Path) -> RunConfig:
    """With the paths of local files absolute, so that a run can be resumed from anywhere. Relative ones start at
    `folder`, the config file's."""

    def absolute(path: str) -> str:
        return str((folder / path).resolve())

    data, model = config.data, config.model
    changes: dict[str, Any] = {"clients": {c: p if is_hub(p) else absolute(p) for c, p in data.clients.items()}}
    if data.train and data.train != "demo" and not is_hub(data.train):
        changes["train"] = absolute(data.train)
    for part in ("validation", "test"):
        if isinstance(getattr(data, part), str) and not is_hub(getattr(data, part)):
            changes[part] = absolute(getattr(data, part))
    local = model.path not in PACKAGED and (folder / model.path).exists()
    if not local and model.path not in PACKAGED and Path(model.path).exists():  # transformers would take that one
        raise ConfigError(
            f"model.path = {model.path!r} starts at {folder.resolve()}, the folder of the file that names it, and "
            f"there is no such model; the working directory has one of that name. Give its whole path, "
            f"if it is meant."
        )
    private = config.privacy
    if private is not None:
        private = private.model_copy(update={"ledger": absolute(private.ledger)})
    return config.model_copy(
        update={
            "privacy": private,
            "data": data.model_copy(update=changes),
            "model": model.model_copy(update={"path": absolute(model.path)}) if local else model,
        }
    )
