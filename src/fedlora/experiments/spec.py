"""An experiment: a base configuration, axes of named changes to it, a learning-rate search, seeds, profiles.

title, question, claims         words
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
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from fedlora.errors import ConfigError
from fedlora.experiments.merger_settings import resolved
from fedlora.experiments.scores import parse_number
from fedlora.given_files import read_toml
from fedlora.runs.reading import flat, set_in

# Keys that change no score, and keys that a search would be judged by.
NOT_TO_SEARCH = ("run.seed", "run.threads", "run.workers", "data.validation", "data.test", "data.max_test")
NO_EXPERIMENTS = ("paper_numbers", "claims")  # our own files that may lie beside experiments
WHY = "why"  # in `skip`, beside labels of axes
Changes = dict[str, Any]
Cell = Mapping[str, str]  # axis -> label


class Part(BaseModel):
    """A table of an experiment's file."""

    model_config = ConfigDict(extra="forbid", frozen=True)


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
    the number to compare, instead of the experiment's. note: a note for the report.
    """

    seeds: Annotated[list[int], Field(min_length=1)]
    set: Changes = {}
    axes: dict[str, list[str]] = {}
    tune: list[float] = []
    metric: str | None = None
    note: str = ""


class Peace(Part):
    """Where nobody attacks: a row's loss there is its price (table `prices`).

    axis: the axis of attacks, not a row axis. label: its label for no attack.
    """

    axis: str
    label: str


class Budgets(Part):
    """The cost of privacy (table `budgets`), in an experiment with two axes.

    axis: the axis whose labels are budgets. none: its label without [privacy]. lines: the axis with a line per label.
    """

    axis: str
    none: str
    lines: str


class Experiment(Part):
    """One experiment's file.

    name: the experiment's name; default: the file's. title: a title for tables and the report. question: the question,
    for tables and the report. metric: the number to compare, such as "test, last". rows: the axes that are rows of its
    table; the first one's labels are compared. columns: the axes that are columns; default: all others. reference: a
    label of the first row axis, with which the others are compared. paper: its key in paper_numbers.toml. claims: names
    of claims in claims.toml, for readers. run: the tables of a run's configuration, common to all; relative paths start
    at this file. axes: axis -> label -> changes, as { "clients.alpha" = 0.1 }; an empty table removes one that only an
    earlier axis made. tune: the search for the best value of a key. profiles: scales to run at, by name. skip:
    combinations of labels that are not cells; `why`, beside the labels, is told under the tables. peace: the label
    without an attack, for a table of each row's cost there and its saving elsewhere. budgets: the axes of a table and a
    picture of scores by epsilon. merged: an axis whose labels are not changes of the run but mergers of its uploads:
    one run serves them all.
    """

    name: str
    title: str
    question: str
    metric: str = "test, last"
    rows: list[str] = ["method"]
    columns: list[str] = []
    reference: str | None = None
    paper: str | None = None
    claims: list[str] = []
    run: dict[str, Any]
    axes: dict[str, dict[str, Changes]]
    tune: Tune | None = None
    profiles: dict[str, Profile]
    skip: list[dict[str, str]] = []
    peace: Peace | None = None
    budgets: Budgets | None = None
    merged: str | None = None
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

    @property
    def called(self) -> str:
        """The experiment's name in commands: its name if it is in a folder `experiments`, otherwise its path."""
        if self._folder is None or self._folder.name == "experiments":
            return self.name
        return str(self._folder / f"{self.name}.toml")

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
        made = self.model_copy(update={"profiles": {**self.profiles, profile: changed}})
        made._folder, made._only = self.folder, self._only  # a copy of the fields lacks private attributes
        return made

    def without(self, cells: Sequence[Cell]) -> Experiment:
        """The experiment without these cells."""
        made = self.model_copy(update={"skip": [*self.skip, *map(dict, cells)]})
        made._folder, made._only = self.folder, self._only
        return made

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
        made._folder, made._only = self.folder, dict(only)
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
    try:
        experiment = Experiment.model_validate({"name": path.stem, **raw})
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigError(f"{path} is not an experiment: {wrong}.") from error
    _check_labels(experiment, path)
    experiment._folder = path.parent
    return experiment


def load_all(folder: Path) -> list[Experiment]:
    """Every experiment of the folder, by name."""
    return [load_experiment(folder / f"{name}.toml") for name in names_in(folder)]


def names_in(folder: Path) -> list[str]:
    """The names of the experiments there."""
    return sorted(path.stem for path in folder.glob("*.toml") if path.stem not in NO_EXPERIMENTS)


def _check_labels(experiment: Experiment, path: Path) -> None:
    """Raises `ConfigError` if the file names something that it does not have: nothing in it may be without effect."""
    axes, tune = experiment.axes, experiment.tune

    def refuse(what: str) -> None:
        raise ConfigError(f"{path}: {what}")

    def look(whose: str, axis: str, label: str) -> None:
        if label not in axes.get(axis, {}):
            refuse(f"{whose} names {axis} = {label!r}, which no axis has.")

    def once(whose: str, values: Sequence[object]) -> None:
        if doubled := [value for value in values if values.count(value) > 1]:
            refuse(f"{whose} names {doubled[0]!r} twice; leave it out once.")

    once("rows and columns", [*experiment.rows, *experiment.columns])
    for key in ("values", "over", "seeds") if tune else ():
        once(f"[tune] {key}", getattr(tune, key))
    for metric in [experiment.metric, *(profile.metric for profile in experiment.profiles.values())]:
        if metric is not None:
            parse_number(metric)
    if not experiment.rows:
        refuse("rows = [] names no axis; a table has at least one.")
    for axis in [*experiment.rows, *experiment.columns, *(tune.over if tune else [])]:
        if axis not in axes:
            refuse(f"{axis!r} is not an axis; there are {', '.join(axes)}.")
    if experiment.reference is not None:
        look("reference", experiment.rows[0], experiment.reference)
    if experiment.merged is not None:
        if experiment.merged not in axes:
            refuse(f"merged = {experiment.merged!r} is not an axis; there are {', '.join(axes)}.")
        resolved(axes[experiment.merged])
    if experiment.peace is not None:
        look("peace", experiment.peace.axis, experiment.peace.label)
        if experiment.reference is None or experiment.peace.axis == experiment.rows[0]:
            refuse("peace asks what each row costs beside a reference: name one, and another axis than the first row.")
    if experiment.budgets is not None:
        budgets = experiment.budgets
        look("budgets", budgets.axis, budgets.none)
        if budgets.lines not in axes or {budgets.axis, budgets.lines} != {*axes}:
            refuse(f"budgets needs exactly two axes, `axis` and `lines`; there are {', '.join(axes)}.")
    for name, profile in experiment.profiles.items():
        if {} in profile.set.values():
            refuse(f"profile {name} sets a table to {{}}; only a label takes tables away, those of an earlier axis.")
        once(f"profile {name}, seeds,", profile.seeds)
        once(f"profile {name}, tune,", profile.tune)
        for axis, labels in profile.axes.items():
            once(f"profile {name}, {axis},", labels)
            for label in labels:
                look(f"profile {name}", axis, label)
        shared = sorted({*profile.seeds} & {*tune.seeds}) if tune and len(profile.tune or tune.values) > 1 else []
        if shared:
            refuse(f"seed {shared[0]} is both searched on and of profile {name}; keep the two apart.")
    for skipped in experiment.skip:
        if {*skipped} <= {WHY}:
            refuse("skip names no label: it would leave out every cell.")
        for axis, label in skipped.items():
            if axis != WHY:
                look("skip", axis, label)
    for axis, label in (tune.at if tune else {}).items():
        look("tune.at", axis, label)
    if tune is not None and tune.key in NOT_TO_SEARCH:
        refuse(f"tune.key = {tune.key!r} cannot be searched.")
    if "run.seed" in flat(experiment.run):
        refuse("[run.run] sets seed, but runs take the seeds of their profile: write [profiles.NAME] seeds instead.")
    if tune is not None and tune.key in flat(experiment.run):
        refuse(
            f"[run] sets {tune.key}, but the search does: write its values in [tune] values, and leave it out there."
        )
    check_set_once(experiment, f"{path}: ")
    _check_apart(experiment, path)


def check_set_once(experiment: Experiment, where: str = "") -> None:
    """Raises `ConfigError` for a label or profile that sets what the search or the seeds set: its runs would differ
    from their name."""
    changes = {
        f"{axis} = {label!r}": of
        for axis, labels in experiment.axes.items() if axis != experiment.merged
        for label, of in labels.items()
    } | {f"profile {name}": profile.set for name, profile in experiment.profiles.items()}  # fmt: skip
    tune = experiment.tune
    for key, whose in {"run.seed": "the seeds of the profile", **({tune.key: "the search"} if tune else {})}.items():
        for name, of in changes.items():
            if key in flat(of):
                raise ConfigError(
                    f"{where}{name} sets {key}, and so do {whose}: which of the two counts? Leave one of them out."
                )


def _check_apart(experiment: Experiment, path: Path) -> None:
    """Raises `ConfigError` for labels of two axes that set one key, or a table and a key of it, differently in one
    cell: one of them would be lost, under the name of both. A later axis may take a table away."""
    axes = [(axis, labels) for axis, labels in experiment.axes.items() if axis != experiment.merged]
    for (one, ours), (other, theirs) in itertools.combinations(axes, 2):
        for label, beside in itertools.product(ours, theirs):
            for (key, value), (later, its) in itertools.product(ours[label].items(), theirs[beside].items()):
                fine = not _meet(key, later) or its == {} or _nested(key, value) == _nested(later, its)
                if not fine and not experiment.skips({one: label, other: beside}):
                    raise ConfigError(
                        f"{path}: {one} = {label!r} sets {key} = {value!r}, and {other} = {beside!r} sets {later} = "
                        f"{its!r}: which of the two counts? Leave it out of one axis"
                        + (", or set a table's keys by their dotted keys." if dict in (type(value), type(its)) else ".")
                    )
    common = [*flat(experiment.run), *(key for profile in experiment.profiles.values() for key in profile.set)]
    before: list[str] = []
    for axis, labels in axes:
        for label, key in [(name, key) for name, of in labels.items() for key in of if of[key] == {}]:
            others = [of for of in common if _meet(key, of)]
            if others or not any(_meet(key, of) for of in before):
                raise ConfigError(
                    f"{path}: {axis} = {label!r} has {key} = {{}}, which takes away a table that an earlier axis made; "
                    + (f"but [run] or a profile sets {others[0]}." if others else "but no earlier axis sets any of it.")
                    + " Leave it out, or let an axis before it, alone, set that table."
                )
        before += [key for changes in labels.values() for key, value in changes.items() if value != {}]


def _meet(one: str, other: str) -> bool:
    """Whether two dotted keys are one, or one is of a table within the other's."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _nested(key: str, value: Any) -> dict[str, Any]:
    """The tables that a dotted key alone makes."""
    raw: dict[str, Any] = {}
    set_in(raw, key, value)
    return raw
