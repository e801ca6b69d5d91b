"""What an experiment runs at a profile, decided before anything runs: cells x seeds -> runs, each with a digest."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from fedlora.errors import ConfigError, FedLoRAError, refuse
from fedlora.experiments.scores import Number, parse_number
from fedlora.experiments.spec import Cell, Changes, Experiment
from fedlora.runs.checks import on_a_toy
from fedlora.runs.config import RunConfig, located, parse_config
from fedlora.runs.identity import digest_of
from fedlora.runs.privacy_section import SIMULATED
from fedlora.runs.reading import place_of, set_in

Stage = Literal["search", "run"]
LEDGER = "simulated-ledger.jsonl"  # of a private run, in its folder


@dataclass(frozen=True)
class Planned:
    """One run. value: of the searched key, or None. stage: runs of the "search" choose it, and are in no table. digest:
    what the run is known by, wherever it is made (`identity.digest_of`). experiment: which it belongs to, for trackers
    and in its line."""

    cell: Cell
    seed: int
    value: float | None
    stage: Stage
    config: RunConfig
    digest: str
    experiment: str

    @property
    def label(self) -> str:
        """The cell, the value and the seed in words."""
        value = "" if self.value is None else f", {self.value:g}"
        return f"{', '.join(self.cell.values())}{value}, seed {self.seed}"


@dataclass(frozen=True)
class Grid:
    """An experiment at a profile. only: axis -> the labels that are wanted. wanted_seeds: some of the profile's seeds;
    None: all. What is left out changes no run: a search is that of the whole grid.

    Raises:
        ConfigError: no such profile, axis, label or seed, or no cell is left.
    """

    experiment: Experiment
    profile: str
    only: Mapping[str, Sequence[str]] = field(default_factory=dict)
    wanted_seeds: Sequence[int] | None = None

    def __post_init__(self) -> None:
        name = f"experiment {self.experiment.name}, profile {self.profile}"
        seeds = self.experiment.profile(self.profile).seeds
        for axis, labels in self.only.items():
            known = self.experiment.labels(self.profile, axis) if axis in self.experiment.axes else []
            if unknown := [label for label in labels if label not in known]:
                there = ", ".join(map(repr, known)) or f"only the axes {', '.join(self.experiment.axes)}"
                raise ConfigError(f"{axis} of {name} has no {unknown[0]!r}; it has {there}.")
        if unknown_seeds := sorted({*(self.wanted_seeds or [])} - {*seeds}):
            raise ConfigError(f"{unknown_seeds[0]} is not a seed of {name}: it has {', '.join(map(str, seeds))}.")
        if not self.cells:
            raise ConfigError(f"{name} skips all cells" + (f" of {dict(self.only)}." if self.only else "."))

    @property
    def rows(self) -> str:
        """The axis whose labels are compared."""
        return self.experiment.rows

    @property
    def name(self) -> str:
        return f"{self.experiment.name}-{self.profile}"

    @property
    def seeds(self) -> Sequence[int]:
        return self.experiment.profile(self.profile).seeds if self.wanted_seeds is None else self.wanted_seeds

    @property
    def values(self) -> Sequence[float]:
        """The values of the search, in order; empty without one."""
        tune = self.experiment.tune
        return [] if tune is None else sorted(self.experiment.profile(self.profile).tune or tune.values)

    @cached_property
    def cells(self) -> list[Cell]:
        """The combinations of labels that are wanted."""
        every = self.experiment.cells(self.profile)
        return [cell for cell in every if all(cell[axis] in labels for axis, labels in self.only.items())]

    @cached_property
    def axes(self) -> list[str]:
        """The axes with more than one label, the compared one first; it alone if there is no other."""
        several = [axis for axis in self.experiment.axes if len({cell[axis] for cell in self.cells}) > 1]
        return [self.rows, *(axis for axis in several if axis != self.rows)]

    def number(self, name: str | None = None) -> Number:
        """A number by its name; by default the one that the profile or the experiment compares."""
        return parse_number(name or self.experiment.profile(self.profile).metric or self.experiment.metric)

    def key(self, cell: Cell) -> tuple[str, ...]:
        """The labels for which the search chooses one value."""
        return () if self.experiment.tune is None else tuple(cell[axis] for axis in self.experiment.tune.over)

    @cached_property
    def search(self) -> Mapping[tuple[str, ...], Mapping[float, Sequence[Planned]]]:
        """Labels on tune.over -> value -> the runs of the search, for the wanted cells; empty if there is nothing to
        choose. The labels that confine a search need not be the profile's own."""
        tune = self.experiment.tune
        if tune is None or len(self.values) < 2:
            return {}
        wanted = {self.key({**cell, **tune.at}) for cell in self.cells}
        moved = [{**cell, **tune.at} for cell in self.experiment.cells(self.profile)]
        cells = {tuple(cell.items()): cell for cell in moved}.values()
        found: dict[tuple[str, ...], dict[float, list[Planned]]] = {}
        for cell in (cell for cell in cells if self.key(cell) in wanted):
            for value in self.values:
                each = [self.planned(cell, seed, value, "search") for seed in tune.seeds]
                found.setdefault(self.key(cell), {}).setdefault(value, []).extend(each)
        return found

    @cached_property
    def searches(self) -> list[Planned]:
        """The runs of the search, each once."""
        each = [run for by_value in self.search.values() for mine in by_value.values() for run in mine]
        return list({run.digest: run for run in each}.values())

    def runs(self, chosen: Mapping[tuple[str, ...], float | None]) -> list[Planned]:
        """The runs that count, of cells whose value is chosen. chosen: labels on tune.over -> value."""
        found = []
        for cell in self.cells:
            value = chosen.get(self.key(cell))
            if value is not None or self.experiment.tune is None:
                found += [self.planned(cell, seed, value, "run") for seed in self.seeds]
        return found

    def planned(self, cell: Cell, seed: int, value: float | None, stage: Stage) -> Planned:
        """One run. The later wins: [run], the profile's set, the axes in the file's order, the searched value, the
        seed. Without run.threads it has one thread: another machine can then go on with it, to the same bits.

        Raises:
            ConfigError: the configuration is none; the message names the cell.
        """
        experiment = self.experiment
        raw: dict[str, Any] = deepcopy(experiment.run)
        try:
            for change in (experiment.profile(self.profile).set, *(experiment.axes[a][x] for a, x in cell.items())):
                _apply(raw, change)
            set_in(raw, "run.seed", seed)
            if value is not None and experiment.tune is not None:
                set_in(raw, experiment.tune.key, int(value) if value.is_integer() else value)
            if isinstance(raw["run"], dict):
                raw["run"].setdefault("threads", 1)
            config = parse_config(_simulated(raw))
            if experiment.folder is not None:
                config = with_ledger(located(config, experiment.folder), LEDGER)
            return Planned(cell, seed, value, stage, config, digest_of(config), experiment.name)
        except ConfigError as error:
            raise ConfigError(f"experiment {experiment.name}, {dict(cell)}: {error}") from error

    def faults(self) -> dict[tuple[str, ...], str]:
        """Labels of a cell -> why it cannot be run, as far as its configuration shows, without data and model."""
        found: dict[tuple[str, ...], str] = {}
        seen: set[str] = set()  # data and models are many, servers and clients few
        for cell in self.cells:
            moved = self.experiment.tune.at if self.experiment.tune is not None and len(self.values) > 1 else {}
            try:
                for one in (cell, {**cell, **moved}):
                    config = self.planned(one, self.seeds[0], self.values[0] if self.values else None, "run").config
                    by_data = config.data.clients or config.data.task == "superni"  # then the data count the clients
                    other = {"model", "lora", "train", *([] if by_data else ["data"])}
                    if (key := config.model_dump_json(exclude=other)) not in seen:
                        refuse(on_a_toy(config, [f"site-{k}" for k in range(client_count(config) or 1)])[1])
                    seen.add(key)
            except FedLoRAError as error:
                found[tuple(cell.values())] = str(error).partition(f"{dict(cell)}: ")[2] or str(error)
        return found


def client_count(config: RunConfig) -> int:
    """The number of clients, as far as the configuration tells; 0 if only the data do."""
    data = config.data
    return len(data.clients) or (data.tasks if data.task == "superni" else config.clients.how_many)


def with_ledger(config: RunConfig, path: str) -> RunConfig:
    """The run, charged to that file; a run without [privacy] stays as it is."""
    if config.privacy is None:
        return config
    return config.model_copy(update={"privacy": config.privacy.model_copy(update={"ledger": path})})


def as_text(run: Planned) -> str:
    """What a process elsewhere needs of a run, as JSON."""
    facts = {"cell": dict(run.cell), "seed": run.seed, "value": run.value, "stage": run.stage, "digest": run.digest}
    return json.dumps({**facts, "experiment": run.experiment, "config": json.loads(run.config.canonical())})


def from_text(text: str) -> Planned:
    """`as_text` read back."""
    facts = json.loads(text)
    return Planned(**{**facts, "config": RunConfig.model_validate(facts["config"])})


def _apply(raw: dict[str, Any], changes: Changes) -> None:
    for key, value in changes.items():
        if value == {}:
            table, last = place_of(raw, key)
            table.pop(last, None)
        else:
            set_in(raw, key, deepcopy(value))


def _simulated(raw: dict[str, Any]) -> dict[str, Any]:
    """The tables of a run: if it has [privacy], its clients are simulated. Each such run is a population of its own,
    with a ledger in its folder, so that a grid spends nobody's budget. Raises `ConfigError` if it names others, or data
    of one's own, whose digest results would tell."""
    privacy, data = raw.get("privacy"), raw.get("data")
    if not isinstance(privacy, dict):
        return raw
    wrong = [f"privacy.{key}" for key in ("population", "ledger", "budget") if key in privacy]
    if isinstance(data, dict) and (data.get("clients") or data.get("train") not in (None, "demo")):
        wrong.append("data of one's own")
    if wrong:
        raise ConfigError(
            f"{', '.join(wrong)}: an experiment simulates [privacy], on data that everybody has (data.task, "
            f"data.train = 'demo'), each run with a population and a ledger of its own. To train on real clients and "
            f"charge them, use fedlora run."
        )
    return {**raw, "privacy": {**privacy, "population": SIMULATED, "ledger": LEDGER}}
