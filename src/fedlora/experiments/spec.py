"""An experiment: a base configuration, axes of named changes to it, a learning-rate search, seeds, profiles.

title, question                 words
[run.*]                         tables of a run's configuration, common to all; relative paths start at this file
[axes.NAME]                     label -> changes, as { "clients.alpha" = 0.1 }; a cell is one label of each axis. An
                                empty table removes a table that earlier axes made: { privacy = {} }
[tune]                          a key, its values, and over which axes the best one is chosen, on seeds of its own
[profiles.mini], .paper         seeds, further changes, and which labels of an axis are run
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from fedlora.errors import ConfigError
from fedlora.experiments.spec_checks import WHY, check_names
from fedlora.given_files import read_toml

_PAPER = "paper_numbers"  # a file that may lie beside experiments
Changes = dict[str, Any]
Cell = Mapping[str, str]  # axis -> label


class Part(BaseModel):
    """A table of an experiment's file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def read(cls, raw: Mapping[str, Any], wrong: str) -> Self:
        """From TOML. Raises `ConfigError`, which begins with `wrong` and names each error."""
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            each = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise ConfigError(f"{wrong}: {each}.") from error


class Tune(Part):
    """A search over one number, before the runs that count.

    key: the searched key. values: the values to try; the best on validation is taken. over: the axes for whose labels
    the best value is chosen. at: labels of other axes, to which the search is confined. seeds: for the search alone.
    """

    key: str = "train.lr"
    values: Annotated[list[float], Field(min_length=1)]
    over: list[str] = ["method"]
    at: dict[str, str] = {}
    seeds: list[int] = [1000]


class Profile(Part):
    """A scale to run at.

    seeds: each cell runs once for each seed. set: further changes of the configuration; a cell's own take precedence.
    axes: axis -> the labels to run, instead of all. tune: values of the search, instead of the experiment's. metric:
    the number to compare, instead of the experiment's. note: a note for readers of the file.
    """

    seeds: Annotated[list[int], Field(min_length=1)]
    set: Changes = {}
    axes: dict[str, list[str]] = {}
    tune: list[float] = []
    metric: str | None = None
    note: str = ""


class Experiment(Part):
    """One experiment's file.

    name: the experiment's name; default: the file's. title: a title for tables and pictures. question: the question,
    for readers of the file. metric: the number to compare, such as "test, last". rows: the axis whose labels are
    compared, a row of a table each. reference: one of these labels, with which the others are compared. paper: its key
    in paper_numbers.toml. run: the tables of a run's configuration, common to all; relative paths start at this file.
    axes: axis -> label -> changes, as { "clients.alpha" = 0.1 }; an empty table removes one that only an earlier axis
    made. tune: the search for the best value of a key. profiles: scales to run at, by name. skip: combinations of
    labels that are not cells; `why`, beside the labels, is told under the tables.
    """

    name: str
    title: str
    question: str
    metric: str = "test, last"
    rows: str = "method"
    reference: str | None = None
    paper: str | None = None
    run: dict[str, Any]
    axes: dict[str, dict[str, Changes]]
    tune: Tune | None = None
    profiles: dict[str, Profile]
    skip: list[dict[str, str]] = []
    _folder: Path | None = PrivateAttr(None)
    _only: Mapping[str, Sequence[str]] = PrivateAttr({})

    @property
    def folder(self) -> Path | None:
        """The file's folder, where relative paths start. Runs are then identified by the content of files there. None
        for a comparison, which has no file: its paths are absolute and identify its runs."""
        return self._folder

    @property
    def only(self) -> Mapping[str, Sequence[str]]:
        """Axis -> the labels that are wanted, if it was `narrowed`."""
        return self._only

    def profile(self, name: str) -> Profile:
        """A profile. Raises `ConfigError` if the file does not have it."""
        if name not in self.profiles:
            raise ConfigError(f"experiment {self.name} has no profile {name!r}; it has {', '.join(self.profiles)}.")
        return self.profiles[name]

    def compared(self, profile: str) -> str:
        """The number to compare: the profile's, or the experiment's."""
        return self.profile(profile).metric or self.metric

    def with_seeds(self, profile: str, seeds: Sequence[int]) -> Experiment:
        """The experiment with these seeds instead of the profile's."""
        changed = self.profile(profile).model_copy(update={"seeds": list(seeds)})
        return self.model_copy(update={"profiles": {**self.profiles, profile: changed}})

    def without(self, cells: Sequence[Cell]) -> Experiment:
        """The experiment without these cells."""
        return self.model_copy(update={"skip": [*self.skip, *map(dict, cells)]})

    def narrowed(self, profile: str, only: Mapping[str, Sequence[str]]) -> Experiment:
        """The experiment with only the cells of these labels of some axes, each run as in the whole experiment.

        Raises:
            ConfigError: no such axis, no such label in the profile, or no cell is left.
        """
        for axis, labels in only.items():
            if axis not in self.axes:
                raise ConfigError(f"experiment {self.name} has no axis {axis!r}; it has {', '.join(self.axes)}.")
            known = self.profile(profile).axes.get(axis, list(self.axes[axis]))
            if unknown := [label for label in labels if label not in known]:
                raise ConfigError(
                    f"{axis} of experiment {self.name}, profile {profile}, has no {unknown[0]!r}; it has "
                    f"{', '.join(map(repr, known))}."
                )
        made = self.model_copy()
        made._only = dict(only)
        if not any(made.cells(profile)):
            raise ConfigError(f"experiment {self.name}, profile {profile}, skips all cells of {dict(only)}.")
        return made

    def cells(self, profile: str) -> Iterator[Cell]:
        """Every combination of labels that the profile runs, and that is wanted (`narrowed`)."""
        for cell in self.every_cell(profile):
            if all(cell[axis] in labels for axis, labels in self._only.items()):
                yield cell

    def every_cell(self, profile: str) -> Iterator[Cell]:
        """Every combination of labels that the profile runs."""
        chosen = self.profile(profile).axes
        labels = [[(axis, label) for label in chosen.get(axis, list(options))] for axis, options in self.axes.items()]
        for combination in itertools.product(*labels):
            cell = dict(combination)
            if not self.skips(cell):
                yield cell

    def left_out(self, profile: str) -> list[str]:
        """A line for each combination of the profile's labels that is skipped for a reason."""
        chosen = self.profile(profile).axes
        found = [({axis: label for axis, label in one.items() if axis != WHY}, one.get(WHY)) for one in self.skip]
        return [
            f"{', '.join(labels.values())} is left out: {why}."
            for labels, why in found
            if why and all(label in chosen.get(axis, [label]) for axis, label in labels.items())
        ]

    def skips(self, cell: Cell) -> bool:
        """Whether that combination of labels is skipped."""
        return any(
            all(cell.get(axis) == label for axis, label in skipped.items() if axis != WHY) for skipped in self.skip
        )


def load_experiment(path: Path) -> Experiment:
    """An experiment from its file.

    Raises:
        ConfigError: no such file, no TOML, or not an experiment, with a line for each error.
    """
    raw = read_toml(path, "the experiment")
    experiment = Experiment.read({"name": path.stem, **raw}, f"{path} is not an experiment")
    check_names(experiment, f"{path}: ")
    experiment._folder = path.parent
    return experiment


def names_in(folder: Path) -> list[str]:
    """The names of the experiments there."""
    return sorted(path.stem for path in folder.glob("*.toml") if path.stem != _PAPER)
