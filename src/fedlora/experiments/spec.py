"""An experiment's file: a base configuration, axes of named changes to it, a search, seeds, profiles.

title, question                 words
[run.*]                         tables of a run's configuration, common to all; relative paths start at this file
[axes.NAME]                     label -> changes, as { "clients.dirichlet_alpha" = 0.1 }; a cell is a label of each axis
[tune]                          a key, its values, and over which axes the best one is chosen, on seeds of its own
[profiles.mini], .paper         seeds, further changes, and which labels of an axis are run
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from fedlora.errors import ConfigError, refuse, repeated, said_by
from fedlora.experiments.scores import parse_number
from fedlora.given_files import read_toml
from fedlora.runs.reading import flat

_PAPER = "paper_numbers"  # a file that may lie beside experiments
Changes = dict[str, Any]  # "table.key" -> value
Cell = Mapping[str, str]  # axis -> label
# Keys that change no score, and keys that a search would be judged by.
NOT_TO_SEARCH = ("run.seed", "run.threads", "run.workers", "data.validation", "data.test", "data.max_test")


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

    key: str = "train.learning_rate"
    values: Annotated[list[float], Field(min_length=1)]
    over: list[str] = ["method"]
    at: dict[str, str] = {}
    seeds: Annotated[list[int], Field(min_length=1)] = [1000]


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
    compared, a row of a table each. reference: one of these labels, with which the others are compared. margin: a
    difference of the metric that does not matter, in its unit; differences then get a verdict. paper: its key in
    paper_numbers.toml. run: the tables of a run's configuration, common to all; relative paths start at this file.
    axes: axis -> label -> changes, as { "clients.dirichlet_alpha" = 0.1 }; of two axes that set one key the later wins,
    and an empty table removes a table. tune: the search for the best value of a key. profiles: scales to run at, by
    name.
    skip: combinations of labels that are not cells.
    """

    name: str
    title: str
    question: str = ""
    metric: str = "test, last"
    rows: str = "method"
    reference: str | None = None
    margin: Annotated[float, Field(gt=0)] | None = None
    paper: str | None = None
    run: dict[str, Any]
    axes: dict[str, dict[str, Changes]]
    tune: Tune | None = None
    profiles: dict[str, Profile]
    skip: list[dict[str, str]] = []
    _folder: Path | None = PrivateAttr(None)

    @property
    def folder(self) -> Path | None:
        """The file's folder, where relative paths start. None for a comparison: its paths are absolute."""
        return self._folder

    def profile(self, name: str) -> Profile:
        """A profile. Raises `ConfigError` if the file does not have it."""
        if name not in self.profiles:
            raise ConfigError(f"experiment {self.name} has no profile {name!r}; it has {', '.join(self.profiles)}.")
        return self.profiles[name]

    def labels(self, profile: str, axis: str) -> Sequence[str]:
        """The labels of an axis that the profile runs."""
        return self.profile(profile).axes.get(axis, list(self.axes[axis]))

    def cells(self, profile: str) -> Iterator[Cell]:
        """Every combination of labels that the profile runs, and that `skip` does not name."""
        each = [[(axis, label) for label in self.labels(profile, axis)] for axis in self.axes]
        for combination in itertools.product(*each):
            cell = dict(combination)
            if not self.skips(cell):
                yield cell

    def skips(self, cell: Cell) -> bool:
        """Whether that combination of labels is skipped."""
        return any(skipped.items() <= cell.items() for skipped in self.skip)

    def without(self, cells: Sequence[Cell]) -> Experiment:
        """The experiment without these cells."""
        return self.model_copy(update={"skip": [*self.skip, *map(dict, cells)]})


def load_experiment(path: Path) -> Experiment:
    """An experiment from its file.

    Raises:
        ConfigError: no such file, no TOML, or not an experiment, with a line for each error.
    """
    experiment = Experiment.read(
        {"name": path.stem, **read_toml(path, "the experiment")}, f"{path} is not an experiment"
    )
    refuse(wrong_in(experiment), f"{path}: ")
    experiment._folder = path.parent
    return experiment


def names_in(folder: Path) -> list[str]:
    """The names of the experiments there."""
    return sorted(path.stem for path in folder.glob("*.toml") if path.stem != _PAPER)


def wrong_in(experiment: Experiment) -> Iterator[str]:
    """A sentence for each name that the file does not have, each value that it names twice, and each label or profile
    that sets what the seeds or the search set: its runs would differ from their name."""
    axes, tune, profiles = experiment.axes, experiment.tune, experiment.profiles
    named = [("rows", experiment.rows, [] if experiment.reference is None else [experiment.reference])]
    named += [("skip", axis, [label]) for skipped in experiment.skip for axis, label in skipped.items()]
    named += [(f"profile {p}", axis, labels) for p, one in profiles.items() for axis, labels in one.axes.items()]
    listed: list[tuple[str, Sequence[object]]] = [(f"profile {p}, seeds,", one.seeds) for p, one in profiles.items()]
    listed += [(f"profile {p}, {axis},", labels) for p, one in profiles.items() for axis, labels in one.axes.items()]
    taken = {"run.seed": "the seeds of a profile set it"}
    if tune is not None:
        named += [("tune.over", axis, []) for axis in tune.over]
        named += [("tune.at", axis, [label]) for axis, label in tune.at.items()]
        listed += [("tune.values", tune.values), ("tune.over", tune.over), ("tune.seeds", tune.seeds)]
        taken[tune.key] = "the search sets it"
        if tune.key in NOT_TO_SEARCH:
            yield f"tune.key = {tune.key!r} cannot be searched."
        for p, one in profiles.items():
            if len(one.tune or tune.values) > 1 and (shared := sorted({*one.seeds} & {*tune.seeds})):
                yield f"seed {shared[0]} is both searched on and of profile {p}; keep the two apart."
    for whose, axis, labels in named:
        if axis not in axes:
            yield f"{whose}: {axis!r} is not an axis; there are {', '.join(axes)}."
        elif unknown := [label for label in labels if label not in axes[axis]]:
            yield f"{whose}: {axis} has no label {unknown[0]!r}; it has {', '.join(axes[axis])}."
    for whose, values in listed:
        if twice := repeated(map(str, values)):
            yield f"{whose} names {twice[0]} twice; leave it out once."
    changes = [(f"profile {p}", one.set) for p, one in profiles.items()]
    changes += [(f"{axis} = {label!r}", change) for axis, each in axes.items() for label, change in each.items()]
    for whose, change in [("[run]", experiment.run), *changes]:
        for key in taken.keys() & flat(change).keys():
            if whose != "[run]" or key == "run.seed":
                yield f"{whose} sets {key}, and {taken[key]}."
    for metric in [experiment.metric, *(one.metric for one in profiles.values() if one.metric is not None)]:
        yield from said_by(lambda metric=metric: parse_number(metric))  # type: ignore[misc]
