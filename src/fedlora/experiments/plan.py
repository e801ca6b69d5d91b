"""Which runs an experiment is made of: the search for a learning rate first, then every cell with every seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fedlora.errors import ConfigError
from fedlora.experiments.results import Result
from fedlora.experiments.spec import Cell, Changes, Experiment
from fedlora.runs.config import RunConfig, parse_config
from fedlora.training.metrics import best_of


@dataclass(frozen=True)
class PlannedRun:
    """One run. tuned: the searched value. searching: whether it belongs to the search."""

    cell: Cell
    seed: int
    tuned: float | None
    searching: bool
    config: RunConfig
    digest: str

    @property
    def label(self) -> str:
        """The cell, the value and the seed in words."""
        value = "" if self.tuned is None else f", {self.tuned:g}"
        return f"{', '.join(self.cell.values())}{value}, seed {self.seed}"


def searches(experiment: Experiment, profile: str) -> list[PlannedRun]:
    """The runs of the search; none where there is one value only."""
    tune, values = experiment.tune, _values(experiment, profile)
    if tune is None or len(values) < 2:
        return []
    planned: dict[str, PlannedRun] = {}
    for cell in _searched(experiment, profile):
        for value in values:
            for seed in tune.seeds:
                run = _planned(experiment, profile, cell, seed, value, searching=True)
                planned.setdefault(run.digest, run)
    return list(planned.values())


def mains(experiment: Experiment, profile: str, results: Mapping[str, Result]) -> list[PlannedRun]:
    """The runs that count, of those cells whose search is done."""
    planned = []
    for cell in experiment.cells(profile):
        value = chosen_value(experiment, profile, cell, results)
        if value is None and experiment.tune is not None:
            continue
        for seed in experiment.profile(profile).seeds:
            planned.append(_planned(experiment, profile, cell, seed, value, searching=False))
    return planned


def chosen_value(experiment: Experiment, profile: str, cell: Cell, results: Mapping[str, Result]) -> float | None:
    """The searched value that is best on validation, in the mean over the search's runs of all cells that share it.

    Best by the runs' metric: the largest, or of a loss the least. None while one of them is missing. A tie goes to the
    smaller value.
    """
    tune, values = experiment.tune, _values(experiment, profile)
    if tune is None:
        return None
    if len(values) == 1:
        return values[0]
    alike = [c for c in _searched(experiment, profile) if all(c[axis] == cell[axis] for axis in tune.over)]
    means: list[tuple[float, float]] = []
    metrics: set[str] = set()
    for value in values:
        runs = [_planned(experiment, profile, c, seed, value, searching=True) for c in alike for seed in tune.seeds]
        found = [results[run.digest] for run in runs if run.digest in results]
        if len(found) < len(runs):
            return None
        means.append((value, fmean(result.validation_best for result in found)))
        metrics |= {result.metric for result in found}
    if len(metrics) > 1:
        raise ConfigError(
            f"experiment {experiment.name}: a search over runs of different metrics ({', '.join(sorted(metrics))}) "
            f"cannot choose; give them one evaluate.metric."
        )
    best = best_of(metrics.pop(), means, lambda pair: pair[1])
    if best is None:
        raise ConfigError(
            f"experiment {experiment.name}: none of {tune.key} = {', '.join(f'{v:g}' for v in values)} has a score on "
            f"validation that is a number for {dict(cell)}: all of them diverged. Add smaller values."
        )
    return best[0]


def _searched(experiment: Experiment, profile: str) -> list[Cell]:
    """The cells on which the search is run."""
    at = experiment.tune.at if experiment.tune else {}
    return [cell for cell in experiment.cells(profile) if all(cell[axis] == label for axis, label in at.items())]


def _values(experiment: Experiment, profile: str) -> Sequence[float]:
    if experiment.tune is None:
        return []
    return sorted(experiment.profile(profile).tune or experiment.tune.values)


def _planned(
    experiment: Experiment, profile: str, cell: Cell, seed: int, value: float | None, *, searching: bool
) -> PlannedRun:
    raw: dict[str, Any] = deepcopy(experiment.run)
    for axis, label in cell.items():
        _apply(raw, experiment.axes[axis][label])
    _apply(raw, experiment.profile(profile).set)
    for axis, label in cell.items():  # a cell's own changes win over the profile's scale
        _apply(raw, experiment.axes[axis][label])
    _apply(raw, {"run.seed": seed})
    if value is not None and experiment.tune is not None:
        _apply(raw, {experiment.tune.key: value})
    try:
        config = parse_config(raw)
    except ConfigError as error:
        raise ConfigError(f"experiment {experiment.name}, {dict(cell)}: {error}") from error
    return PlannedRun(cell, seed, value, searching, config, config.digest())


def _apply(raw: dict[str, Any], changes: Changes) -> None:
    for key, value in changes.items():
        *path, last = key.split(".")
        table = raw
        for part in path:
            table = table.setdefault(part, {})
        table[last] = deepcopy(value)
