"""A run of an experiment: its cell, seed and searched value, the configuration that they make, and its identity."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from fedlora.errors import ConfigError
from fedlora.experiments.digits import shown
from fedlora.experiments.spec import Cell, Changes, Experiment
from fedlora.runs.config import RunConfig, located, parse_config
from fedlora.runs.inputs import contents, digest_of
from fedlora.runs.private_simulation import LEDGER, simulated, with_ledger
from fedlora.runs.reading import place_of, set_in

Configured = tuple[RunConfig, str, Mapping[str, str]]  # configuration, digest, files


@dataclass(frozen=True)
class PlannedRun:
    """One run. tuned: the searched value. searching: whether it belongs to the search. digest: its identity. files: key
    -> content of its own data, model and method, if they are part of its identity (`inputs.contents`). experiment: the
    one that requests it, whose file gets the result."""

    cell: Cell
    seed: int
    tuned: float | None
    searching: bool
    config: RunConfig
    digest: str
    files: Mapping[str, str] = field(default_factory=dict)
    experiment: str = ""

    @property
    def label(self) -> str:
        """The cell, the value and the seed in words."""
        value = "" if self.tuned is None else f", {shown(self.tuned)}"
        return f"{', '.join(self.cell.values())}{value}, seed {self.seed}"


def told_once(whys: Mapping[str, Sequence[str]]) -> list[str]:
    """A line for each reason, with the first of the labels that it holds for."""
    each = {why: list(dict.fromkeys(labels)) for why, labels in whys.items()}
    return [
        f"{labels[0]}{f' and {len(labels) - 1} more' if len(labels) > 1 else ''}: {why}" for why, labels in each.items()
    ]


def where(experiment: Experiment, cell: Cell) -> str:
    """How an error begins that is about this cell."""
    return f"experiment {experiment.name}, {dict(cell)}"


def configured(experiment: Experiment, profile: str, cell: Cell, seed: int, value: float | None) -> Configured:
    """The configuration of a cell's run, its digest, and its files by content. Raises `ConfigError` if it is none."""
    raw: dict[str, Any] = deepcopy(experiment.run)
    try:
        changes = [experiment.axes[axis][label] for axis, label in cell.items()]
        for change in (experiment.profile(profile).set, *changes):  # a cell's own take precedence
            _apply(raw, change)
        _apply(raw, {"run.seed": seed})
        if value is not None and experiment.tune is not None:
            _apply(raw, {experiment.tune.key: int(value) if value.is_integer() else value})
        text = json.dumps(simulated(raw), default=str)
        config, digest = _parsed(text)
        files: Mapping[str, str] = {}
        if experiment.folder is not None:
            config = with_ledger(located(config, experiment.folder), LEDGER)
        files = contents(config)
    except ConfigError as error:
        raise ConfigError(f"{where(experiment, cell)}: {error}") from error
    if value is not None and experiment.tune is not None:
        _check_number_key(config, experiment.tune.key, where(experiment, cell))
    return config, digest_of(config, files) if files else digest, files


@lru_cache(maxsize=4096)  # tables and pictures plan the same runs repeatedly
def _parsed(text: str) -> tuple[RunConfig, str]:
    config = parse_config(json.loads(text))
    return config, config.digest()


def _check_number_key(config: RunConfig, key: str, where: str) -> None:
    """A searched key must hold a number, not a list or table made from one."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part, None)
    if not isinstance(value, int | float):
        raise ConfigError(f"{where}: the search is over numbers, but {key} is not one: it became {value!r}.")


def _apply(raw: dict[str, Any], changes: Changes) -> None:
    for key, value in changes.items():
        if value == {}:
            table, last = place_of(raw, key)
            table.pop(last, None)  # remove a table that an earlier axis made
        else:
            set_in(raw, key, deepcopy(value))
