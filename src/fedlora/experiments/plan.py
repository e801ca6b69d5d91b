"""Which runs an experiment is made of: the search for a learning rate first, then every cell with every seed.

And what is known of them before they start: what cannot be run, and which results are of other data or other code.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from fedlora.core.lora import Adapter, LoRA
from fedlora.core.messages import Client
from fedlora.errors import ConfigError, FedLoRAError, counted
from fedlora.experiments.digits import shown
from fedlora.experiments.merger_settings import check_run, resolved, searched_as
from fedlora.experiments.result import Result
from fedlora.experiments.scores import parse_number
from fedlora.experiments.spec import Cell, Changes, Experiment
from fedlora.runs.config import RunConfig, located, parse_config
from fedlora.runs.inputs import MISSING, contents, digest_of, named, own_paths
from fedlora.runs.private_simulation import LEDGER, simulated, with_ledger
from fedlora.training.metrics import best_of

# (axes but the merged one, seed, searched value) -> (configuration, digest, files)
Known = dict[tuple[Any, ...], tuple[RunConfig, str, Mapping[str, str]]]


@dataclass(frozen=True)
class PlannedRun:
    """One run. tuned: the searched value. searching: whether it belongs to the search. digest: what it is known by.
    files: key -> content of its own data, model and method, where it is known by these (`inputs.contents`).
    mergers: label -> settings of what is made of its uploads (`mergers`); of one cell the one label that it stands for.
    experiment: the one that asks for it, whose file its result goes to."""

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
        """What came of it, among results by digest: of its cell's merger where it has one. None where that lacks."""
        found = results.get(self.digest)
        if found is None or not self.mergers:
            return found
        each = [found.merged(label, merger) for label, merger in self.mergers.items()]
        return None if None in each else each[0]

    def left(self, results: Mapping[str, Result]) -> PlannedRun | None:
        """What of it is to be done: with those mergers that were not made yet. None where all is there."""
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
    """The runs of the search; none where there is one value only."""
    tune, values = experiment.tune, _values(experiment, profile)
    if tune is None or len(values) < 2:
        return []
    planned: dict[str, PlannedRun] = {}
    known: Known = {}
    for cell in _searched(experiment, profile):
        for value in values:
            for seed in tune.seeds:
                run = _planned(experiment, profile, cell, seed, value, searching=True, known=known)
                planned[run.digest] = with_mergers_of(run, planned.get(run.digest))
    return list(planned.values())


def with_mergers_of(run: PlannedRun, other: PlannedRun | None) -> PlannedRun:
    """The run with the mergers of another one of its digest as well: one training serves both."""
    return run if other is None else replace(other, mergers={**other.mergers, **run.mergers})


def mains(
    experiment: Experiment, profile: str, results: Mapping[str, Result], failed: Collection[str] = ()
) -> list[PlannedRun]:
    """The runs that count, of those cells whose search is done. failed: as `chosen_value` takes it."""
    planned = []
    known: Known = {}
    for cell in experiment.cells(profile):
        value, _ = _search(experiment, profile, cell, results, failed, known)
        if value is None and experiment.tune is not None:
            continue
        for seed in experiment.profile(profile).seeds:
            planned.append(_planned(experiment, profile, cell, seed, value, searching=False, known=known))
    return planned


def waiting(
    experiment: Experiment, profile: str, results: Mapping[str, Result], failed: Collection[str] = ()
) -> list[PlannedRun]:
    """A stand-in, at the largest value tried, for each run of a cell whose search is not done: what it will cost, and
    not what will be run."""
    planned: dict[str, PlannedRun] = {}
    known: Known = {}
    for cell in experiment.cells(profile) if experiment.tune is not None else ():
        if _search(experiment, profile, cell, results, failed, known) == (None, None):
            for seed in experiment.profile(profile).seeds:
                value = _values(experiment, profile)[-1]
                run = _planned(experiment, profile, cell, seed, value, searching=False, known=known)
                planned[run.digest] = run
    return list(planned.values())


def chosen_value(
    experiment: Experiment, profile: str, cell: Cell, results: Mapping[str, Result], failed: Collection[str] = ()
) -> float | None:
    """The searched value that is best on validation, in the mean over the search's runs of all cells that share it.

    Best by the runs' metric: the largest, or of a loss the least. None while one of them is missing, and where no value
    has a score (`dead_end` says so). A tie goes to the smaller value.

    Args:
        failed: digests of runs that cannot be had. A value with one of them is none of the search.
    """
    value, _ = _search(experiment, profile, cell, results, failed)
    return value


def dead_end(
    experiment: Experiment, profile: str, cell: Cell, results: Mapping[str, Result], failed: Collection[str] = ()
) -> str | None:
    """Why a search that is done could choose nothing; None where it chose or is not done."""
    _, why = _search(experiment, profile, cell, results, failed)
    return why


def _search(
    experiment: Experiment, profile: str, cell: Cell, results: Mapping[str, Result], failed: Collection[str],
    known: Known | None = None,
) -> tuple[float | None, str | None]:  # fmt: skip
    """(value, why there is none where there can be none)"""
    tune, values = experiment.tune, _values(experiment, profile)
    if tune is None:
        return None, None
    if len(values) == 1:
        return values[0], None
    if experiment.merged is not None:  # controls go by what they are held against
        axis, label = experiment.merged, cell[experiment.merged]
        cell = {**cell, axis: searched_as(experiment.axes[axis], label, experiment.reference)}
    alike = [c for c in _searched(experiment, profile) if all(c[axis] == cell[axis] for axis in tune.over)]
    means: list[tuple[float, float]] = []
    metrics: set[str] = set()
    known = {} if known is None else known
    for value in values:
        runs = [
            _planned(experiment, profile, c, seed, value, searching=True, known=known)
            for c in alike
            for seed in tune.seeds
        ]
        if any(run.digest in failed and run.digest not in results for run in runs):
            continue
        found = [result for run in runs if (result := run.result(results)) is not None]
        if len(found) < len(runs):
            return None, None
        means.append((value, fmean(result.validation_best for result in found)))
        metrics |= {result.metric for result in found}
    if len(metrics) > 1:
        raise ConfigError(
            f"experiment {experiment.name}: a search over runs of different metrics ({', '.join(sorted(metrics))}) "
            f"cannot choose; give them one evaluate.metric."
        )
    grid = f"{tune.key} = {', '.join(map(shown, values))}"
    if not means:
        return None, f"no run of the search over {grid} came to its end."
    best = best_of(metrics.pop(), means, lambda pair: pair[1])
    if best is None:
        return None, f"none of {grid} has a score on validation that is a number: all of them diverged. Try others."
    return best[0], None


def worst_values(
    experiment: Experiment, profile: str, results: Mapping[str, Result], failed: Mapping[str, str]
) -> list[str]:
    """A line for each value that counts as the worst of its search: a run of it failed, or has no score on validation.

    failed: digest -> why, of runs that failed.
    """
    seeds: dict[tuple[str, str, str], list[int]] = {}
    for run in searches(experiment, profile):
        value = f"{experiment.tune.key} = {shown(run.tuned)}" if experiment.tune and run.tuned is not None else ""
        if run.digest in results:
            if not math.isnan(results[run.digest].validation_best):
                continue
            why = ""
        elif run.digest in failed:
            why = failed[run.digest]
        else:
            continue
        seeds.setdefault((", ".join(run.cell.values()), value, why), []).append(run.seed)
    return [f"{cell}: {dropped_value(value, on, why)}" for (cell, value, why), on in seeds.items()]


def dropped_value(value: str, seeds: Sequence[int], why: str) -> str:
    """What is said of a value that counts as the worst. why: empty where the run ended, without a score."""
    on = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, sorted(seeds)))}"
    if not why:
        return f"{value} counts as the worst of the search: on {on} it diverged, and has no score on validation."
    return f"{value} is dropped from the search, for it failed on {on}: {why}"


def check_number(experiment: Experiment, profile: str, which: str) -> None:
    """Raises `ConfigError`, before anything is run, for a number (`Result.score`) that is none, or that no run
    of the profile can have."""
    number, whys = parse_number(which), []
    for cell in experiment.cells(profile):
        value = _values(experiment, profile)[0] if experiment.tune else None
        seed = experiment.profile(profile).seeds[0]
        why = number.lacks(_planned(experiment, profile, cell, seed, value, searching=False).config)
        if why is None:
            return
        whys.append(why)
    if whys:
        raise ConfigError(f"no run can have the number {which!r}: {whys[0]}.")


def at_the_edge(experiment: Experiment, profile: str, value: float | None) -> str | None:
    """ "largest" or "smallest" where the searched value is that one of those tried: the best may lie beyond."""
    values = _values(experiment, profile)
    if value is None or len(values) < 2 or values[0] < value < values[-1]:
        return None
    return "largest" if value == values[-1] else "smallest"


def _searched(experiment: Experiment, profile: str) -> list[Cell]:
    """The cells on which the search is run: the profile's, at the labels to which the search is confined. These need
    not be the profile's own."""
    at = experiment.tune.at if experiment.tune else {}
    found: list[Cell] = []
    for cell in experiment.cells(profile):
        moved = {**cell, **at}
        if moved not in found and not experiment.skips(moved):
            found.append(moved)
    return found


def _values(experiment: Experiment, profile: str) -> Sequence[float]:
    if experiment.tune is None:
        return []
    return sorted(experiment.profile(profile).tune or experiment.tune.values)


def _planned(
    experiment: Experiment, profile: str, cell: Cell, seed: int, value: float | None, *, searching: bool,
    known: Known | None = None,
) -> PlannedRun:  # fmt: skip
    """known: configurations of runs that were planned before, by all that they follow from: mergers share them."""
    where = f"experiment {experiment.name}, {dict(cell)}"
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
        for change in changes:  # a cell's own changes win over the profile's scale
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


@lru_cache(maxsize=4096)  # tables, pages and verdicts plan the same runs again and again
def _parsed(text: str) -> tuple[RunConfig, str]:
    config = parse_config(json.loads(text))
    return config, config.digest()


def _check_number_key(config: RunConfig, key: str, where: str) -> None:
    """A key that is searched has a number, and no list or table that was made of one."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part, None)
    if not isinstance(value, int | float):
        raise ConfigError(f"{where}: the search is over numbers, and {key} is none: it became {value!r}.")


def _apply(raw: dict[str, Any], changes: Changes) -> None:
    for key, value in changes.items():
        *path, last = key.split(".")
        table = raw
        for depth, part in enumerate(path, start=1):
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                known = ".".join(path[:depth])
                raise ConfigError(f"{key!r} is no key: {known} is a value, not a table.")
        if value == {}:
            table.pop(last, None)  # a table that an axis before made, taken away
        else:
            table[last] = deepcopy(value)


# ---- before they start -----------------------------------------------------------------------------------------------


def check_runnable(runs: Iterable[PlannedRun]) -> None:
    """Raises `ConfigError`, with the run, for a method or a rule that there is not, or that refuses its settings, and
    for ranks that are not those of as many clients. What only data or model show is found when a run begins."""
    known: set[str] = set()
    for run in runs:
        config = run.config
        told = config.model_dump_json(include={"method", "server", "defence", "clients", "data"})
        if told in known:
            continue
        known.add(told)
        why = unfit(config)
        if why is not None:
            raise ConfigError(f"{run.label} cannot be run: {why}")


def unfit(config: RunConfig) -> str | None:
    """Why the configuration alone shows that it cannot be run, with any seed; None where it does not."""
    try:
        server = config.server.build(config.method.build(), config.run.seed, config.defence.build())
        names = [str(k) for k in range(clients_of(config))]
        assigned = config.clients.assigned(names, config.run.seed) if names else {}
        ranks = {of.attention for of in assigned.values()}
        if ranks:  # a model of one square matrix says whether the method serves them
            size = max(ranks)
            state = server.init(Adapter({"any": LoRA(torch.zeros(size, size), torch.eye(size))}))
            for rank in sorted(ranks):
                server.download(state, Client(f"of rank {rank}", rank))
    except FedLoRAError as error:
        return str(error)
    return None


def clients_of(config: RunConfig) -> int:
    """How many there are: the files of data.clients, the tasks of superni, or clients.count, else one for each rank;
    0 where only the data tell."""
    clients, data = config.clients, config.data
    if data.clients:
        return len(data.clients)
    if data.task == "superni":
        return data.tasks
    return clients.count or len([] if clients.profile else clients.ranks or [])


def missing_files(runs: Sequence[PlannedRun]) -> list[str]:
    """A line for each file or folder that there is not."""
    found = {key: _path(run, key) for run in runs for key, what in run.files.items() if what == MISSING}
    return [
        f"{key}: {path} does not exist, and runs are known by its content. Relative paths start at the folder of the "
        f"experiment's file."
        for key, path in found.items()
    ]


def _path(run: PlannedRun, key: str) -> str:
    return own_paths(run.config).get(key, run.config.method.name)


def other_files(runs: Sequence[PlannedRun], results: Mapping[str, Result]) -> list[str]:
    """A line for each data set or model of which there are results of another content, under the same name in the same
    configuration; and for each that is not there now."""
    wanted = {named(run.config).digest(): run for run in runs if run.files and run.digest not in results}
    found: Counter[tuple[str, str, str, str]] = Counter()
    for result in results.values() if wanted else ():
        run = wanted.get(result.settings.digest()) if result.files else None
        if run is None:
            continue
        for key, here in run.files.items():
            if result.files.get(key) != here != MISSING:
                found[key, _path(run, key), result.files.get(key, ""), here] += 1
    return missing_files(list(wanted.values())) + [
        f"{key}: {counted(count, 'finished run')} of the same configuration had a {Path(path).name} with SHA-256 "
        f"{there[:12]}, and {path} has {here[:12]}: another content, and they are not taken."
        for (key, path, there, here), count in found.items()
    ]


def left_out(
    experiment: Experiment, profile: str, results: Mapping[str, Result], unclean: Mapping[str, Result], folder: Path,
    failed: Collection[str],
) -> list[str]:  # fmt: skip
    """A line where runs of the profile, of its search or its table, have no result but one of code that no commit
    describes. unclean: these, of `folder`. results: all the others."""
    aside = {digest: result for digest, result in unclean.items() if digest not in results}
    runs = [*searches(experiment, profile), *mains(experiment, profile, {**aside, **results}, failed)] if aside else []
    gone = [aside[digest] for digest in dict.fromkeys(run.digest for run in runs) if digest in aside]
    if not gone:
        return []
    whys = ("was installed without git" if one.commit is None else "was changed after its commit" for one in gone)
    why = " and ".join(f"{count} of code that {what}" for what, count in Counter(whys).items())
    return [
        f"{experiment.name}, profile {profile}: {counted(len(gone), 'finished run')} left out, because no commit says "
        f"which code made them: {why}. They stand in {folder}. To have such runs counted, make them from a git "
        f"checkout without changes (git clone, pip install -e), in a new work folder: fedlora experiment run "
        f"{experiment.name} --profile {profile} --work NEW."
    ]
