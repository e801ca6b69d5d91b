"""A federation's settings from a file of `fedlora run`: it keeps what is agreed, and refuses keys of one machine."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedlora.errors import ConfigError
from fedlora.flower.terms.one_machine import ELSEWHERE, refuse_elsewhere
from fedlora.flower.terms.settings import FederationSettings, NetworkSection
from fedlora.given_files import read_toml
from fedlora.runs.config import RunConfig, override_in
from fedlora.runs.reading import checked

# Keys that have had their effect once a trial has dealt the run's data out, to sites on this machine.
_SPENT = {key for key in ELSEWHERE if key.startswith(("data.", "clients."))} | {
    "model.device", "run.workers", "train.command", "train.time_limit",
}  # fmt: skip


def from_run(
    run: RunConfig | Mapping[str, Any],
    labels: Sequence[str] | None = None,
    *,
    id: str | None = None,
    network: NetworkSection | None = None,
    dealt: bool = False,
    at_server: Mapping[str, str] | None = None,
) -> FederationSettings:
    """A federation's settings from a run's configuration, or from its nested tables.

    Args:
        labels: the classes, in order; None takes data.labels. id: default: a new one. dealt: a trial distributes the
            run's own data, so the keys for that (data.train, data.clients, clients.*) have had their effect and are
            not refused.
        at_server: files on which the server measures, by part ("validation", "test"); sites hold out nothing for them.

    Raises:
        ConfigError: a key that belongs to one machine, with its name and what to do.
    """
    tables, here = _agreed(_tables(run), labels, dealt, at_server or {})
    own: dict[str, Any] = {"id": id or f"fed-{secrets.token_hex(3)}", "network": network, "at_server": here or None}
    own = {name: value for name, value in own.items() if value is not None}
    return checked(FederationSettings, {**own, **tables}).check()


def _tables(run: RunConfig | Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(run, RunConfig):
        return run
    raw = run.model_dump(mode="json", exclude_defaults=True)
    raw.setdefault("model", {})["path"] = run.model.path
    return raw


def read_run_file(
    path: Path,
    overrides: Sequence[str] = (),
    labels: Sequence[str] | None = None,
    *,
    id: str | None = None,
    network: NetworkSection | None = None,
) -> FederationSettings:
    """A federation's settings from a file like that of `fedlora run`, which need not name any data.

    Raises:
        ConfigError: as `from_run`.
    """
    raw = read_toml(path, "the config")
    for override in overrides:
        override_in(raw, override)
    try:
        found = from_run(raw, labels, id=id, network=network)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return found.located(path.parent)


def refuse_undealt(config: RunConfig) -> None:
    """Raises `ConfigError` for a key that not even a trial, which deals the run's data out, can have: from the
    configuration alone, before its model is loaded."""
    _agreed(_tables(config), None, True, {})


def _agreed(
    raw: Mapping[str, Any], labels: Sequence[str] | None, dealt: bool, at_server: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tables that all agree on, and the server's own keys. Raises `ConfigError` for a key of one machine."""
    tables = {name: dict(table) if isinstance(table, Mapping) else table for name, table in raw.items()}
    here: dict[str, Any] = {}
    model, data = tables.get("model", {}), tables.get("data", {})
    if isinstance(model, dict) and (path := model.pop("path", None)):
        here["model"] = path
    if isinstance(data, dict):
        tables["data"] = data
        here |= {part: data.pop(part) for part in ("validation", "test") if isinstance(data.get(part), str)}
        here |= at_server
        for part in ("validation", "test"):
            if part in here:  # then no site holds anything out for it
                data[part] = 0.0
        if labels is not None:
            if data.get("labels") not in (None, list(labels)):
                raise ConfigError(
                    f"data.labels = {data['labels']} and the labels {list(labels)} contradict each other."
                )
            data["labels"] = list(labels)
    if dealt:
        kept = {
            table: {k: v for k, v in keys.items() if f"{table}.{k}" not in _SPENT} for table, keys in tables.items()
        }
        tables = {table: keys for table, keys in kept.items() if keys}
    refuse_elsewhere(tables)
    return tables, here


__all__ = ["from_run", "read_run_file", "refuse_undealt"]
