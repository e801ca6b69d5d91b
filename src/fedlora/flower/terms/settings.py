"""federation.toml: a run's TOML with an id and the table [network]. Each site lays its own keys over it (site_file.py).

    id = "fed-4f21c0"       made once; sites keep their state by it
    [network]               the server's address
    [model] [data] [lora] [method] [server] [robust] [privacy] [train] [run] [evaluate]      as in a run's file

model.name is the server's copy of the base model, and a *file* in data.validation or data.test is the server's; a
*share* there is what each site holds out of its own. join.toml carries the settings to the sites, without what belongs
to the server's machine. A key that has no effect in a federation is refused (`ELSEWHERE`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from fedlora.core.text import quoted
from fedlora.errors import ConfigError
from fedlora.flower.terms import HELD_OUT, HeldOut
from fedlora.flower.terms.privacy import FederationPrivacy, refusals
from fedlora.flower.terms.site_file import Site, absolute
from fedlora.given_files import read_toml
from fedlora.runs.config import RunConfig
from fedlora.runs.data_sections import DataSection
from fedlora.runs.reading import checked
from fedlora.runs.sections import ModelSection
from fedlora.training.settings import Section

Port = Annotated[int, Field(ge=1, le=65535)]
FederationId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]  # it names folders
UNNAMED = "each site's own"  # model.name and data.train where nobody has named one

# What a site's trainer takes from the settings; quorum, participation and stopping are the server's.
_OF_SITES: dict[str, Any] = {
    **dict.fromkeys(("model", "data", "lora", "method", "train"), True), "server": {"heads"},
    "run": {"rounds", "seed", "threads"}, "evaluate": {"metric", "max_new_tokens", "batch_size"},
}  # fmt: skip

_OF_RUNS = "it is for `fedlora run`"
ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("data.train", "data.clients"), "each site names its file in its site.toml"),
    **dict.fromkeys(("train.command", "train.timeout", "model.device"), "each site sets it in its site.toml"),
    "clients": "policy.toml says who takes part, with which rank (fedlora flower init --sites)",
    "model.adapter": "fedlora flower init --start names a start",
    **dict.fromkeys(
        ("evaluate.target", "evaluate.clients_at_end"),
        "data.validation and data.test say who measures: a file is the server's, a share is what each site holds out",
    ),
    **dict.fromkeys((
        "attack", "server.gauge_stress", "data.task", "data.tasks", "data.unseen_tasks", "data.task_lists",
        "run.workers", "run.checkpoint_every", "run.keep_checkpoints", "run.readouts", "run.keep_uploads",
        "evaluate.samples",
    ), _OF_RUNS),
}  # fmt: skip
"""Keys of a run's file, and tables, that have no effect in a federation -> what has it instead."""

# What is not in join.toml; nor is it read out of such a file.
_STAYS = (*ELSEWHERE, "network", "model.name", "model.revision", "run.report_to", "privacy.ledger")


def without_effect(raw: Mapping[str, Any]) -> list[str]:
    """The keys of a file's tables that are in `ELSEWHERE`."""
    given = [f"{table}.{key}" for table, keys in raw.items() if isinstance(keys, Mapping) for key in keys]
    return [key for key in (*raw, *given) if key in ELSEWHERE]


class NetworkSection(Section):
    """name, port: where sites connect, which is the proxy. superlink_port: the SuperLink's, on loopback; if the two
    ports are one, there is no proxy between, and only this machine's sites reach it (`fedlora flower up`)."""

    name: str = "localhost"
    port: Port = 443
    superlink_port: Port = 18080


class FederationSettings(RunConfig):
    """All settings that server and sites share, and the server's own.

    Example:
        >>> settings = FederationSettings(
        ...     id="fed-1", data={"label_names": ["no", "yes"]}, lora={"target_modules": ["q_proj"]}
        ... )
        >>> settings.agreed()["data"]["label_names"]
        ['no', 'yes']
    """

    id: FederationId
    network: NetworkSection = NetworkSection()
    model: ModelSection = ModelSection(name=UNNAMED)
    data: DataSection = DataSection(train=UNNAMED)
    privacy: FederationPrivacy | None = None

    @model_validator(mode="before")
    @classmethod
    def _sites_name_their_own(cls, raw: Any) -> Any:
        """A run's tables without model and data, which each machine has its own. With [privacy] no site holds anything
        out by default, because its scores would be released without noise."""
        if not isinstance(raw, Mapping) or not all(isinstance(raw.get(key, {}), Mapping) for key in ("model", "data")):
            return raw
        held = dict.fromkeys(HELD_OUT, 0.0) if raw.get("privacy") is not None else {}
        data = {"train": UNNAMED, **held, **raw.get("data", {})}
        return {**raw, "model": {"name": UNNAMED, **raw.get("model", {})}, "data": data}

    @model_validator(mode="after")
    def _whole(self) -> FederationSettings:
        if self.model.task == "sequence-classification" and not self.data.label_names:
            raise ValueError(
                "data.label_names is missing: the names of the classes, in the order of their numbers. They are needed "
                "here because no site's file has to hold all classes"
            )
        if ":" in self.method.name:
            raise ValueError(
                f"method.name = {quoted(self.method.name)} is a class in a module, and importing a module of another's "
                f"choice runs it: install it as a package with an entry point in fedlora.methods, at the server and at "
                f"each site, and give that name (docs/how-to/add-a-method.md)"
            )
        return self

    @property
    def base(self) -> str | None:
        """The server's copy of the base model."""
        return None if self.model.name == UNNAMED else self.model.name

    def share(self, part: HeldOut) -> float:
        """What each site holds out of its own file."""
        return value if not isinstance(value := getattr(self.data, part), str) else 0.0

    def files(self) -> dict[str, str]:
        """The server's own files to measure on, by part."""
        return {part: value for part in HELD_OUT if isinstance(value := getattr(self.data, part), str)}

    @property
    def may_change(self) -> tuple[str, ...]:
        """The keys that may change after the first round: run.rounds, unless a schedule or a promise of epsilon is made
        of it."""
        return () if self.privacy is not None or self.train.lr_scheduler_type != "constant" else ("run.rounds",)

    @classmethod
    def of(cls, raw: Mapping[str, Any], folder: Path) -> FederationSettings:
        """The server's settings from a file's tables, its paths made absolute from `folder`. Raises `ConfigError` for
        each mistake, and for keys that belong to a site or to `fedlora run`."""
        if wrong := without_effect(raw):
            text = "; ".join(f"{key} is no setting of a federation: {ELSEWHERE[key]}" for key in wrong)
            raise ConfigError(f"{text}. Leave it out.")
        found = checked(cls, absolute(raw, folder))
        if found.files() and found.base is None:
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

    def agreed(self) -> dict[str, Any]:
        """The tables for join.toml, plain values, without `_STAYS`. Defaults are included, because another version may
        have others."""
        found = self.model_dump(mode="json", exclude=_staying())
        found["data"] |= {part: self.share(part) for part in HELD_OUT}
        return found

    def for_site(self, site: Site, rank: int = 1) -> RunConfig:
        """The input of `runs.preparation.prepare` for a site's trainer: the settings with its own keys over them.

        Raises `ConfigError` for a mistake in site.toml.
        """
        own, agreed = site.own, self.model_dump(exclude_defaults=True, include=_OF_SITES, exclude=_staying())
        data, mine = agreed.get("data", {}), own.get("data", {})
        for these, others in ((("messages",), ("prompt", "response")), (("prompt", "response"), ("messages",))):
            if any(key in mine for key in these):  # one form of rows stands in place of the other
                data = {key: value for key, value in data.items() if key not in others}
        data |= {key: value for key, value in mine.items() if key != "train"}
        data |= {part: self.share(part) for part in HELD_OUT}
        data["clients"] = {site.name: mine.get("train", UNNAMED)}
        train = own.get("train", {}) if "command" in own.get("train", {}) else agreed.get("train", {})
        if not any(map(self.share, HELD_OUT)):
            agreed.pop("evaluate", None)
        tables = {
            **agreed, "data": data, "train": train, "clients": {"ranks": [rank]},
            "model": {**agreed.get("model", {}), **own.get("model", {})},
            "run": {**agreed.get("run", {}), **own.get("run", {})},
        }  # fmt: skip
        try:
            return checked(RunConfig, tables)
        except ConfigError as error:
            raise ConfigError(f"site.toml of {site.name}, over the server's settings: {error}.") from error

    def for_server(self) -> RunConfig | None:
        """The same for measuring, with the server's base model and its files; None if it has none to measure on."""
        files = self.files()
        return self.as_run(str(self.base), **{part: files.get(part, 0.0) for part in HELD_OUT}) if files else None

    def as_run(self, model: str, **data: Any) -> RunConfig:
        """The federation as one run with that base model, as its adapters' cards and its measurements take it. data:
        further keys of [data]."""
        config = self.for_site(Site("server", {"model": {"name": model}}))
        found = {"data": config.data.model_copy(update=data), "evaluate": self.evaluate, "robust": self.robust}
        return config.model_copy(update=found)


def _staying() -> dict[str, Any]:
    """`_STAYS`, as pydantic takes it."""
    found: dict[str, Any] = {}
    for table, _, key in (one.partition(".") for one in _STAYS):
        if not key:
            found[table] = True
        elif found.setdefault(table, set()) is not True:
            found[table].add(key)
    return found
