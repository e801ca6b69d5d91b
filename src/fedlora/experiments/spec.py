"""An experiment's file: a base configuration, axes of named changes to it, a search, seeds, profiles.

A cell is a label of each axis. A comparison is an experiment of one axis.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from fedlora.errors import ConfigError, complaints, refuse, repeated
from fedlora.experiments.scores import parse_number
from fedlora.given_files import read_toml
from fedlora.runs.config import RunConfig
from fedlora.runs.reading import flat
from fedlora.runs.sections import MethodSection

_PAPER = "paper_numbers"  # a file that may lie beside experiments
T = TypeVar("T")
Changes = dict[str, Any]  # "table.key" -> value
Cell = Mapping[str, str]  # axis -> label


def _once(values: list[T]) -> list[T]:
    if twice := repeated(map(str, values)):
        raise ValueError(f"names {twice[0]} twice; leave it out once.")
    return values


def _known(name: str) -> str:
    return parse_number(name).name


Once = Annotated[list[T], AfterValidator(_once)]
Seeds = Annotated[Once[int], Field(min_length=1)]
Metric = Annotated[str, AfterValidator(_known)]


class Part(BaseModel):
    """A table of an experiment's file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def read(cls, raw: Mapping[str, Any], wrong: str) -> Self:
        """From TOML. Raises `ConfigError`, which begins with `wrong` and names each error."""
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            found = [(".".join(map(str, e["loc"])), e["msg"].removeprefix("Value error, ")) for e in error.errors()]
            raise ConfigError(f"{wrong}: {'; '.join(': '.join(filter(None, one)) for one in found)}") from error


class Tune(Part):
    """A search over one number, before the runs that count.

    key: the searched key. values: the values to try; the best on validation is taken. over: the axes for whose labels
    the best value is chosen. at: labels of other axes, to which the search is confined. seeds: for the search alone.
    """

    key: str = "train.learning_rate"
    values: Annotated[Once[float], Field(min_length=1)]
    over: Once[str] = ["method"]
    at: dict[str, str] = {}
    seeds: Seeds = [1000]


class Profile(Part):
    """A scale to run at.

    seeds: each cell runs once for each seed. set: further changes of the configuration; a cell's own take precedence.
    axes: axis -> the labels to run, instead of all. tune: values of the search, instead of the experiment's. metric:
    the number to compare, instead of the experiment's.
    """

    seeds: Seeds
    set: Changes = {}
    axes: dict[str, Once[str]] = {}
    tune: Once[float] = []
    metric: Metric | None = None


class Experiment(Part):
    """One experiment's file.

    name: the experiment's name; default: the file's. title: a title for tables and pictures. metric: the number to
    compare, such as "test, last". rows: the axis whose labels are compared, a row of a table each. reference: one of
    these labels, with which the others are compared. margin: a difference of the metric that does not matter, in its
    unit; differences then get a verdict. paper: its key in paper_numbers.toml. run: the tables of a run's
    configuration, common to all; relative paths start at this file. axes: axis -> label -> changes, as
    { "clients.dirichlet_alpha" = 0.1 }; of two axes that set one key the later wins, and an empty table removes a
    table. tune: the search for the best value of a key. profiles: scales to run at, by name. skip: combinations of
    labels that are not cells.
    """

    name: str
    title: str
    metric: Metric = "test, last"
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

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        refuse(_wrong_in(self))
        return self

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
        for labels in itertools.product(*(self.labels(profile, axis) for axis in self.axes)):
            cell = dict(zip(self.axes, labels, strict=True))
            if not any(skipped.items() <= cell.items() for skipped in self.skip):
                yield cell


def load_experiment(path: Path) -> Experiment:
    """An experiment from its file.

    Raises:
        ConfigError: no such file, no TOML, or not an experiment; each error is named.
    """
    raw = {"name": path.stem, **read_toml(path, "the experiment")}
    experiment = Experiment.read(raw, f"{path} is not an experiment")
    experiment._folder = path.parent
    return experiment


def names_in(folder: Path) -> list[str]:
    """The names of the experiments there."""
    return sorted(path.stem for path in folder.glob("*.toml") if path.stem != _PAPER)


def _wrong_in(experiment: Experiment) -> Iterator[str]:
    """A sentence for each axis or label that the file does not have, and for each label or profile that sets what the
    seeds or the search set: its runs would differ from their name."""
    axes, tune, profiles = experiment.axes, experiment.tune, experiment.profiles
    named = [("rows", experiment.rows, [] if experiment.reference is None else [experiment.reference])]
    named += [("skip", axis, [label]) for skipped in experiment.skip for axis, label in skipped.items()]
    named += [(f"profile {p}", axis, labels) for p, one in profiles.items() for axis, labels in one.axes.items()]
    taken = {"run.seed": "the seeds of a profile set it"}
    if tune is not None:
        named += [("tune.over", axis, []) for axis in tune.over]
        named += [("tune.at", axis, [label]) for axis, label in tune.at.items()]
        taken[tune.key] = "the search sets it"
        for p, one in profiles.items():
            if shared := sorted({*one.seeds} & {*tune.seeds}):
                yield f"seed {shared[0]} is both searched on and of profile {p}; keep the two apart."
    for whose, axis, labels in named:
        if axis not in axes:
            yield f"{whose}: {axis!r} is not an axis; there are {', '.join(axes)}."
        elif unknown := [label for label in labels if label not in axes[axis]]:
            yield f"{whose}: {axis} has no label {unknown[0]!r}; it has {', '.join(axes[axis])}."
    changes = [(f"profile {p}", one.set) for p, one in profiles.items()]
    changes += [(f"{axis} = {label!r}", change) for axis, each in axes.items() for label, change in each.items()]
    for whose, change in [("[run]", experiment.run), *changes]:
        for key in taken.keys() & flat(change).keys():
            if whose != "[run]" or key == "run.seed":
                yield f"{whose} sets {key}, and {taken[key]}."


# ---- a comparison: methods on one configuration, as an experiment of one axis (`fedlora compare`) -------------------

PROFILE = "comparison"  # its only profile


def comparison(
    base: RunConfig,
    methods: Mapping[str, MethodSection],
    seeds: Sequence[int],
    *,
    name: str,
    metric: str | None = None,
    margin: float | None = None,
    tune: Tune | None = None,
) -> Experiment:
    """The methods by label, on the configuration; the first is the reference. Each run has one process and one thread:
    parallel runs change no bit and do not slow each other down.

    Args:
        methods: label -> its section. The bare name of the configuration's own method means the configuration's.
        metric: the compared number; by default the test set at the best validation round, or at the last one without
            validation data; without a test set validation. margin: a difference that does not matter. tune: the search
            for each method.

    Raises:
        ConfigError: unknown methods or settings, all in one line; a search on compared seeds, or without validation
            data; no held-out data; [privacy].
    """
    if base.privacy is not None:
        raise ConfigError(
            "[privacy] and compare do not go together: every run of it, searches included, would be charged to the "
            "clients' ledger, and the first would leave nothing for the others. Compare on public data without the "
            "table; then fedlora run."
        )
    validated = base.data.validation != 0
    tested = base.data.task is not None or base.data.test != 0 or base.clients.test_fraction is not None
    if not validated and (tune is not None or not tested):
        raise ConfigError("data.validation = 0 leaves nothing to search or to compare methods by.")
    methods = {label: base.method if label == base.method.name else section for label, section in methods.items()}
    refuse(f"{label}: {why}" for label, section in methods.items() for why in complaints(section.build))
    one_thread = base.model_copy(update={"run": base.run.model_copy(update={"threads": 1, "workers": None})})
    run = one_thread.model_dump(mode="json", exclude_defaults=True, exclude={"method"})  # the axis has it
    run.setdefault("run", {}).pop("seed", None)
    axis = {
        label: {"method": {"name": section.name, **section.model_dump(mode="json", exclude_defaults=True)}}
        for label, section in methods.items()
    }
    best = "test, best" if validated else "test, last"
    return Experiment.read(
        {
            "name": name, "title": name, "metric": metric or (best if tested else "validation, best"), "run": run,
            "reference": next(iter(axis)), "margin": margin, "axes": {"method": axis}, "tune": tune,
            "profiles": {PROFILE: {"seeds": list(seeds)}},
        },
        "the comparison",
    )  # fmt: skip
