"""An experiment at one profile, with its results: which runs that makes, first the search's, then every cell with every
seed; and what the search chose. The input of checks, tables and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import Any

from fedlora.errors import ConfigError
from fedlora.experiments.digits import alike, shown
from fedlora.experiments.plan import Configured, PlannedRun, configured, told_once, where
from fedlora.experiments.result import Result
from fedlora.experiments.spec import Cell, Experiment
from fedlora.runs.attack_words import attacks_of
from fedlora.training.metrics import best_of


@dataclass(frozen=True)
class Choice:
    """The result of a search. value: the best on validation; None while a run is missing, or if no value can be chosen,
    for the reason `why`. level: all values that share the best score, including the chosen one; empty if it is alone.
    edge: "largest" or "smallest" if the choice is one of these: the best may lie beyond."""

    value: float | None = None
    why: str | None = None
    level: tuple[float, ...] = ()
    edge: str | None = None


@dataclass(frozen=True)
class Grid:
    """results: by digest. failed: digest -> reason, for runs that failed on their own; a searched value with one of
    them is out of the search. by_machine: for runs that this machine failed to run, which says nothing about them."""

    experiment: Experiment
    profile: str
    results: Mapping[str, Result] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    by_machine: Mapping[str, str] = field(default_factory=dict)
    _known: dict[tuple[Any, ...], Configured] = field(default_factory=dict, init=False, repr=False, compare=False)

    # ---- cells -------------------------------------------------------------------------------------------------------

    @property
    def seeds(self) -> Sequence[int]:
        return self.experiment.profile(self.profile).seeds

    @cached_property
    def cells(self) -> list[Cell]:
        """Every combination of labels that is wanted."""
        return list(self.experiment.cells(self.profile))

    @property
    def count(self) -> int:
        """The number of runs that count, whether or not their search is done."""
        return len(self.cells) * len(self.seeds)

    @property
    def rows(self) -> str:
        """The axis whose labels are compared."""
        return self.experiment.rows

    @cached_property
    def axes(self) -> list[str]:
        """The axes with more than one label in the profile; at least the first."""
        found = [axis for axis in self.experiment.axes if len({cell[axis] for cell in self.cells}) > 1]
        return found or [self.rows]

    def which(self, number: str = "") -> str:
        """A number's name; by default the compared one."""
        return number or self.experiment.compared(self.profile)

    def place(self, cell: Cell) -> tuple[str, ...]:
        """The cell's labels on `axes`."""
        return tuple(cell[axis] for axis in self.axes)

    # ---- runs --------------------------------------------------------------------------------------------------------

    @cached_property
    def searches(self) -> list[PlannedRun]:
        """The runs of the search for the cells; none if there is only one value."""
        if self.experiment.tune is None or len(self.values) < 2:
            return []
        found: dict[str, PlannedRun] = {}
        cells = self._searched
        if self.experiment.only:
            needed = [shared for cell in self.cells for shared in self._shared(cell)]
            cells = [cell for cell in cells if cell in needed]
        for cell in cells:
            for value in self.values:
                for run in self._search(cell, value):
                    found.setdefault(run.digest, run)
        return list(found.values())

    @cached_property
    def runs(self) -> list[PlannedRun]:
        """The runs that count, of cells whose search is done."""
        found = []
        for cell in self.cells:
            value = self.choice(cell).value
            if value is not None or self.experiment.tune is None:
                found += [self._planned(cell, seed, value) for seed in self.seeds]
        return found

    @cached_property
    def used(self) -> list[tuple[PlannedRun, Result]]:
        """The runs that count and have a result."""
        return [(run, result) for run in self.runs if (result := self.results.get(run.digest)) is not None]

    @cached_property
    def metrics(self) -> list[str]:
        """Of the used runs, each once."""
        return list(dict.fromkeys(result.metric for _, result in self.used))

    @cached_property
    def attacks(self) -> list[str]:
        """On the used runs, each once, in words."""
        return attacks_of([result.settings.model_dump(include={"attack"}) for _, result in self.used])

    @cached_property
    def waiting(self) -> list[PlannedRun]:
        """A substitute, at the largest value tried, for each run of a cell whose search is not done: it shows the cost,
        not the run."""
        cells = [cell for cell in self.cells if self.experiment.tune is not None and self.choice(cell) == Choice()]
        each = [self._planned(cell, seed, self.values[-1]) for cell in cells for seed in self.seeds]
        return list({run.digest: run for run in each}.values())

    @cached_property
    def missing(self) -> list[PlannedRun]:
        """The runs that can be started now: the search's, or a cell's if its search is done."""
        found: dict[str, PlannedRun] = {}
        for run in [*self.searches, *self.runs]:
            if run.digest not in self.results:
                found.setdefault(run.digest, run)
        return list(found.values())

    def first(self, cell: Cell) -> PlannedRun:
        """The cell's run on the first seed, at the smallest searched value."""
        return self._planned(cell, self.seeds[0], self.values[0] if self.values else None)

    def without_faults(self) -> tuple[Grid, list[str]]:
        """The grid without the cells whose configuration is none, or whose search's is; and a line for each fault, with
        the cell."""
        found: dict[str, list[str]] = {}
        wrong: list[Cell] = []
        tune = self.experiment.tune
        at = tune.at if tune is not None and len(self.values) > 1 else {}
        for cell in self.cells:
            for each in (cell, {**cell, **at}):
                for value in self.values or (None,):
                    try:
                        self._planned(each, self.seeds[0], value)
                    except ConfigError as error:
                        why = str(error).removeprefix(f"{where(self.experiment, each)}: ")
                        found.setdefault(why, []).append(", ".join(each.values()))
                        wrong.append(cell)
        return replace(self, experiment=self.experiment.without(wrong)), told_once(found)

    def _planned(self, cell: Cell, seed: int, value: float | None, *, searching: bool = False) -> PlannedRun:
        key = (tuple(cell.items()), seed, value)
        if key not in self._known:
            self._known[key] = configured(self.experiment, self.profile, cell, seed, value)
        return PlannedRun(cell, seed, value, searching, *self._known[key], self.experiment.name)

    # ---- the search --------------------------------------------------------------------------------------------------

    @cached_property
    def values(self) -> Sequence[float]:
        """The values that are tried, in order; empty without a search."""
        tune = self.experiment.tune
        return [] if tune is None else sorted(self.experiment.profile(self.profile).tune or tune.values)

    def choice(self, cell: Cell) -> Choice:
        """The searched value that is best on validation, in the mean over the search's runs of all cells that share it.

        Best by the runs' metric: the largest, or the least loss. A tie goes to the smallest value.
        """
        tune, values = self.experiment.tune, self.values
        if tune is None:
            return Choice()
        if len(values) == 1:
            return Choice(values[0])
        means: list[tuple[float, float]] = []
        metrics: set[str] = set()
        shared = self._shared(cell)
        for value in values:
            runs = [run for each in shared for run in self._search(each, value)]
            if any(run.digest in self.failed and run.digest not in self.results for run in runs):
                continue
            found = [result for run in runs if (result := self.results.get(run.digest)) is not None]
            if len(found) < len(runs):
                return Choice()
            means.append((value, fmean(result.validation_best for result in found)))
            metrics |= {result.metric for result in found}
        if len(metrics) > 1:
            raise ConfigError(
                f"experiment {self.experiment.name}: a search over runs of different metrics "
                f"({', '.join(sorted(metrics))}) cannot choose; give them one evaluate.metric."
            )
        tried = f"{tune.key} = {', '.join(map(shown, values))}"
        if not means:
            return Choice(why=f"no run of the search over {tried} came to its end.")
        best = best_of(metrics.pop(), means, lambda pair: pair[1])
        if best is None:
            return Choice(
                why=f"none of {tried} has a score on validation that is a number: all of them diverged. Try others."
            )
        level = tuple(value for value, mean in means if alike(mean, best[1]))
        if len(level) > 1:
            return Choice(min(level), level=level)
        ends = {values[0]: "smallest", values[-1]: "largest"}
        return Choice(level[0], edge=ends.get(level[0]))

    def _search(self, cell: Cell, value: float) -> list[PlannedRun]:
        """The search's runs of one cell and value."""
        seeds = [] if self.experiment.tune is None else self.experiment.tune.seeds
        return [self._planned(cell, seed, value, searching=True) for seed in seeds]

    def _shared(self, cell: Cell) -> list[Cell]:
        """The cells whose search chooses this cell's value."""
        over = [] if self.experiment.tune is None else self.experiment.tune.over
        return [other for other in self._searched if all(other[axis] == cell[axis] for axis in over)]

    @cached_property
    def _searched(self) -> list[Cell]:
        """The cells of the search: the profile's, at the labels to which the search is confined. These need not be the
        profile's own."""
        at = self.experiment.tune.at if self.experiment.tune else {}
        found: list[Cell] = []
        for cell in self.experiment.every_cell(self.profile):
            moved = {**cell, **at}
            if moved not in found and not self.experiment.skips(moved):
                found.append(moved)
        return found
