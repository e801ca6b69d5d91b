"""The runs of an experiment: first the search for a learning rate, then every cell with every seed."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import fmean
from typing import Any

from fedlora.errors import ConfigError
from fedlora.experiments.digits import alike, shown
from fedlora.experiments.merger_settings import check_run, resolved, searched_as
from fedlora.experiments.result import Result
from fedlora.experiments.spec import Cell, Changes, Experiment, Tune
from fedlora.runs.config import RunConfig, located, parse_config
from fedlora.runs.inputs import contents, digest_of
from fedlora.runs.private_simulation import LEDGER, simulated, with_ledger
from fedlora.runs.reading import place_of, set_in
from fedlora.training.metrics import best_of

# (axes except the merged one, seed, searched value) -> (configuration, digest, files)
Known = dict[tuple[Any, ...], tuple[RunConfig, str, Mapping[str, str]]]


@dataclass(frozen=True)
class PlannedRun:
    """One run. tuned: the searched value. searching: whether it belongs to the search. digest: its identity. files: key
    -> content of its own data, model and method, if they are part of its identity (`inputs.contents`). mergers: label
    -> settings of the mergers of its uploads (`mergers`); for one cell, its one label. experiment: the one that
    requests it, whose file gets the result."""

    cell: Cell
    seed: int
    tuned: float | None
    searching: bool
    config: RunConfig
    digest: str
    files: Mapping[str, str] = field(default_factory=dict)
    mergers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    experiment: str = ""

    def result(self, results: Mapping[str, Result]) -> Result | None:
        """Its result, among results by digest; its cell's merger, if it has one. None if that is missing."""
        found = results.get(self.digest)
        if found is None or not self.mergers:
            return found
        each = [found.merged(label, merger) for label, merger in self.mergers.items()]
        return None if None in each else each[0]

    def left(self, results: Mapping[str, Result]) -> PlannedRun | None:
        """What remains to be done: the run with the mergers that are missing. None if nothing is."""
        found = results.get(self.digest)
        if found is None:
            return self
        lacking = {label: merger for label, merger in self.mergers.items() if found.merged(label, merger) is None}
        return replace(self, mergers=lacking) if lacking else None

    @property
    def label(self) -> str:
        """The cell, the value and the seed in words."""
        value = "" if self.tuned is None else f", {shown(self.tuned)}"
        return f"{', '.join(self.cell.values())}{value}, seed {self.seed}"


def searches(experiment: Experiment, profile: str) -> list[PlannedRun]:
    """The runs of the search for the experiment's cells; none if there is only one value."""
    tune, values = experiment.tune, _values(experiment, profile)
    if tune is None or len(values) < 2:
        return []
    planned: dict[str, PlannedRun] = {}
    known: Known = {}
    wanted = _searched(experiment, profile)
    if experiment.only:
        needed = [shared for cell in experiment.cells(profile) for shared in _shared(experiment, profile, cell, tune)]
        wanted = [cell for cell in wanted if cell in needed]
    for cell in wanted:
        for value in values:
            for seed in tune.seeds:
                run = _planned(experiment, profile, cell, seed, value, searching=True, known=known)
                planned[run.digest] = with_mergers_of(run, planned.get(run.digest))
    return list(planned.values())


def with_mergers_of(run: PlannedRun, other: PlannedRun | None) -> PlannedRun:
    """The run, with the mergers of another run with its digest: one training serves both."""
    return run if other is None else replace(other, mergers={**other.mergers, **run.mergers})


def mains(
    experiment: Experiment, profile: str, results: Mapping[str, Result], failed: Collection[str] = ()
) -> list[PlannedRun]:
    """The runs that count, of cells whose search is done. failed: as in `choice`."""
    planned = []
    known: Known = {}
    for cell in experiment.cells(profile):
        value = choice(experiment, profile, cell, results, failed, known).value
        if value is None and experiment.tune is not None:
            continue
        for seed in experiment.profile(profile).seeds:
            planned.append(_planned(experiment, profile, cell, seed, value, searching=False, known=known))
    return planned


def waiting(
    experiment: Experiment, profile: str, results: Mapping[str, Result], failed: Collection[str] = ()
) -> list[PlannedRun]:
    """A substitute, at the largest value tried, for each run of a cell whose search is not done: it shows the cost, not
    the run."""
    planned: dict[str, PlannedRun] = {}
    known: Known = {}
    for cell in experiment.cells(profile) if experiment.tune is not None else ():
        if choice(experiment, profile, cell, results, failed, known) == Choice():
            for seed in experiment.profile(profile).seeds:
                value = _values(experiment, profile)[-1]
                run = _planned(experiment, profile, cell, seed, value, searching=False, known=known)
                planned[run.digest] = run
    return list(planned.values())


@dataclass(frozen=True)
class Choice:
    """The result of a search. value: the best on validation; None while a run is missing, or if no value can be chosen,
    for the reason `why`. level: all values that share the best score, including the chosen one; empty if it is alone.
    edge: "largest" or "smallest" if the choice is one of these: the best may lie beyond."""

    value: float | None = None
    why: str | None = None
    level: tuple[float, ...] = ()
    edge: str | None = None


def choice(
    experiment: Experiment, profile: str, cell: Cell, results: Mapping[str, Result], failed: Collection[str] = (),
    known: Known | None = None,
) -> Choice:  # fmt: skip
    """The searched value that is best on validation, in the mean over the search's runs of all cells that share it.

    Best by the runs' metric: the largest, or the least loss. A tie goes to the smallest value.

    Args:
        failed: digests of runs that are impossible. A value with one of them is out of the search. known: as in
            `_planned`.
    """
    tune, values = experiment.tune, _values(experiment, profile)
    if tune is None:
        return Choice()
    if len(values) == 1:
        return Choice(values[0])
    shared = _shared(experiment, profile, cell, tune)
    means: list[tuple[float, float]] = []
    metrics: set[str] = set()
    known = {} if known is None else known
    for value in values:
        runs = [
            _planned(experiment, profile, c, seed, value, searching=True, known=known)
            for c in shared
            for seed in tune.seeds
        ]
        if any(run.digest in failed and run.digest not in results for run in runs):
            continue
        found = [result for run in runs if (result := run.result(results)) is not None]
        if len(found) < len(runs):
            return Choice()
        means.append((value, fmean(result.validation_best for result in found)))
        metrics |= {result.metric for result in found}
    if len(metrics) > 1:
        raise ConfigError(
            f"experiment {experiment.name}: a search over runs of different metrics ({', '.join(sorted(metrics))}) "
            f"cannot choose; give them one evaluate.metric."
        )
    grid = f"{tune.key} = {', '.join(map(shown, values))}"
    if not means:
        return Choice(why=f"no run of the search over {grid} came to its end.")
    best = best_of(metrics.pop(), means, lambda pair: pair[1])
    if best is None:
        return Choice(
            why=f"none of {grid} has a score on validation that is a number: all of them diverged. Try others."
        )
    level = tuple(value for value, mean in means if alike(mean, best[1]))
    if len(level) > 1:
        return Choice(min(level), level=level)
    ends = {values[0]: "smallest", values[-1]: "largest"}
    return Choice(level[0], edge=ends.get(level[0]))


def _shared(experiment: Experiment, profile: str, cell: Cell, tune: Tune) -> list[Cell]:
    """The cells whose search chooses this cell's value."""
    if experiment.merged is not None:  # a control uses the value of the label that it is compared with
        axis, label = experiment.merged, cell[experiment.merged]
        cell = {**cell, axis: searched_as(experiment.axes[axis], label, experiment.reference)}
    return [c for c in _searched(experiment, profile) if all(c[axis] == cell[axis] for axis in tune.over)]


def _searched(experiment: Experiment, profile: str) -> list[Cell]:
    """The cells of the search: the profile's, at the labels to which the search is confined. These need not be the
    profile's own."""
    at = experiment.tune.at if experiment.tune else {}
    found: list[Cell] = []
    for cell in experiment.every_cell(profile):
        moved = {**cell, **at}
        if moved not in found and not experiment.skips(moved):
            found.append(moved)
    return found


def without_faults(experiment: Experiment, profile: str) -> tuple[Experiment, list[str]]:
    """The experiment without the cells whose configuration is none, or whose search's is; and a line for each fault,
    with the cell."""
    tune, values, seeds = experiment.tune, _values(experiment, profile), experiment.profile(profile).seeds
    found: dict[str, list[str]] = {}
    wrong: list[Cell] = []
    known: Known = {}
    at = tune.at if tune is not None and len(values) > 1 else {}
    for cell in experiment.cells(profile):
        for each in (cell, {**cell, **at}):
            for value in values or (None,):
                try:
                    _planned(experiment, profile, each, seeds[0], value, searching=False, known=known)
                except ConfigError as error:
                    why = str(error).removeprefix(f"{_where(experiment, each)}: ")
                    found.setdefault(why, []).append(", ".join(each.values()))
                    wrong.append(cell)
    return experiment.without(wrong), told_once(found)


def told_once(whys: Mapping[str, Sequence[str]]) -> list[str]:
    """A line for each reason, with the first of the labels that it holds for."""
    each = {why: list(dict.fromkeys(labels)) for why, labels in whys.items()}
    return [
        f"{labels[0]}{f' and {len(labels) - 1} more' if len(labels) > 1 else ''}: {why}" for why, labels in each.items()
    ]


def first_run(experiment: Experiment, profile: str, cell: Cell) -> PlannedRun:
    """The cell's run on the profile's first seed, at the smallest searched value."""
    value = _values(experiment, profile)[0] if experiment.tune else None
    return _planned(experiment, profile, cell, experiment.profile(profile).seeds[0], value, searching=False)


def _values(experiment: Experiment, profile: str) -> Sequence[float]:
    if experiment.tune is None:
        return []
    return sorted(experiment.profile(profile).tune or experiment.tune.values)


def _planned(
    experiment: Experiment, profile: str, cell: Cell, seed: int, value: float | None, *, searching: bool,
    known: Known | None = None,
) -> PlannedRun:  # fmt: skip
    """known: configurations of runs planned before, by everything that determines them; mergers share them."""
    where = _where(experiment, cell)
    key = (tuple(pair for pair in cell.items() if pair[0] != experiment.merged), seed, value)
    known = {} if known is None else known
    if key not in known:
        known[key] = _configured(experiment, profile, cell, seed, value, where)
    config, digest, files = known[key]
    mergers: dict[str, dict[str, Any]] = {}
    if experiment.merged is not None:
        label = cell[experiment.merged]
        mergers[label] = resolved(experiment.axes[experiment.merged], [label])[label]
    return PlannedRun(cell, seed, value, searching, config, digest, files, mergers, experiment.name)


def _where(experiment: Experiment, cell: Cell) -> str:
    return f"experiment {experiment.name}, {dict(cell)}"


def _configured(
    experiment: Experiment, profile: str, cell: Cell, seed: int, value: float | None, where: str
) -> tuple[RunConfig, str, Mapping[str, str]]:
    """The configuration of a cell's run, its digest, and its files by content."""
    raw: dict[str, Any] = deepcopy(experiment.run)
    try:
        changes = [experiment.axes[axis][label] for axis, label in cell.items() if axis != experiment.merged]
        for change in changes:
            _apply(raw, change)
        _apply(raw, experiment.profile(profile).set)
        for change in changes:  # a cell's own changes take precedence over the profile's
            _apply(raw, change)
        _apply(raw, {"run.seed": seed})
        if value is not None and experiment.tune is not None:
            _apply(raw, {experiment.tune.key: value})
        text = json.dumps(simulated(raw), default=str)
        config, digest = _parsed(text)
        files: Mapping[str, str] = {}
        if experiment.folder is not None:
            config = with_ledger(located(config, experiment.folder), LEDGER)
            files = contents(config)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    if value is not None and experiment.tune is not None:
        _check_number_key(config, experiment.tune.key, where)
    if experiment.merged is not None:
        check_run(config, where)
    return config, digest_of(config, files) if files else digest, files


@lru_cache(maxsize=4096)  # tables, pages and verdicts plan the same runs repeatedly
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
