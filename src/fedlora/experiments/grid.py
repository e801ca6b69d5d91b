"""An experiment at one profile with its results: the input of tables, verdicts and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from fedlora.experiments.plan import Choice, PlannedRun, choice, mains
from fedlora.experiments.result import Result
from fedlora.experiments.spec import Cell, Experiment


@dataclass(frozen=True)
class Grid:
    """results: by digest. failed: digest -> reason, for runs that failed on their own. by_machine: for runs that this
    machine failed to run, which says nothing about them."""

    experiment: Experiment
    profile: str
    results: Mapping[str, Result]
    failed: Mapping[str, str] = field(default_factory=dict)
    by_machine: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def runs(self) -> list[PlannedRun]:
        """The runs that count, of cells whose search is done."""
        return mains(self.experiment, self.profile, self.results, self.failed)

    @cached_property
    def used(self) -> list[tuple[PlannedRun, Result]]:
        """The runs with a result."""
        return [(run, result) for run in self.runs if (result := run.result(self.results)) is not None]

    def choice(self, cell: Cell) -> Choice:
        """The result of a cell's search."""
        return choice(self.experiment, self.profile, cell, self.results, self.failed)

    @property
    def rows(self) -> str:
        """The axis whose labels are compared."""
        return self.experiment.rows[0]

    @cached_property
    def axes(self) -> list[str]:
        """The axes with more than one label in the profile; at least the first."""
        cells = list(self.experiment.cells(self.profile))
        return [axis for axis in self.experiment.axes if len({cell[axis] for cell in cells}) > 1] or [self.rows]

    def which(self, number: str = "") -> str:
        """A number's name; by default the compared one."""
        return number or self.experiment.compared(self.profile)

    def place(self, cell: Cell) -> tuple[str, ...]:
        """The cell's labels on `axes`."""
        return tuple(cell[axis] for axis in self.axes)

    def of_seeds(self, seeds: Sequence[int]) -> Grid:
        """The grid with a plan's seeds instead of the profile's."""
        return replace(self, experiment=self.experiment.with_seeds(self.profile, seeds))
