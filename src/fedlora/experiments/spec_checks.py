"""What an experiment's file says of itself: names that it has, and nothing set twice or without effect."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fedlora.errors import refuse, said_by
from fedlora.experiments.scores import parse_number
from fedlora.runs.reading import flat, set_in

if TYPE_CHECKING:
    from fedlora.experiments.spec import Experiment

# Keys that change no score, and keys that a search would be judged by.
NOT_TO_SEARCH = ("run.seed", "run.threads", "run.workers", "data.validation", "data.test", "data.max_test")
WHY = "why"  # in `skip`, beside labels of axes


def check_names(experiment: Experiment, where: str) -> None:
    """Raises `ConfigError` with all that is wrong. where: before the message, the file."""
    found = [*_axes(experiment), *_profiles(experiment), *_search(experiment), *_cells(experiment)]
    refuse(found or [*_set_once(experiment), *_meeting(experiment)], where)


def check_set_once(experiment: Experiment) -> None:
    """Raises `ConfigError` for a label or profile that sets what the search or the seeds set: its runs would differ
    from their name."""
    refuse(_set_once(experiment))


def _unknown(experiment: Experiment, whose: str, axis: str, label: str) -> Iterator[str]:
    if label not in experiment.axes.get(axis, {}):
        yield f"{whose} names {axis} = {label!r}, which no axis has."


def _twice(whose: str, values: Sequence[object]) -> Iterator[str]:
    if doubled := [value for value in values if values.count(value) > 1]:
        yield f"{whose} names {doubled[0]!r} twice; leave it out once."


def _axes(experiment: Experiment) -> Iterator[str]:
    """Of the tables."""
    axes, tune = experiment.axes, experiment.tune
    there = f"is not an axis; there are {', '.join(axes)}."
    for metric in [experiment.metric, *(profile.metric for profile in experiment.profiles.values())]:
        if metric is not None:
            yield from said_by(lambda metric=metric: parse_number(metric))  # type: ignore[misc]
    for axis in [experiment.rows, *(tune.over if tune else [])]:
        if axis not in axes:
            yield f"{axis!r} {there}"
    if experiment.reference is not None:
        yield from _unknown(experiment, "reference", experiment.rows, experiment.reference)


def _profiles(experiment: Experiment) -> Iterator[str]:
    tune = experiment.tune
    for name, profile in experiment.profiles.items():
        if {} in profile.set.values():
            yield f"profile {name} sets a table to {{}}; only a label takes tables away, those of an earlier axis."
        yield from _twice(f"profile {name}, seeds,", profile.seeds)
        yield from _twice(f"profile {name}, tune,", profile.tune)
        for axis, labels in profile.axes.items():
            yield from _twice(f"profile {name}, {axis},", labels)
            for label in labels:
                yield from _unknown(experiment, f"profile {name}", axis, label)
        shared = sorted({*profile.seeds} & {*tune.seeds}) if tune and len(profile.tune or tune.values) > 1 else []
        if shared:
            yield f"seed {shared[0]} is both searched on and of profile {name}; keep the two apart."


def _search(experiment: Experiment) -> Iterator[str]:
    tune = experiment.tune
    if "run.seed" in flat(experiment.run):
        yield "[run.run] sets seed, but runs take the seeds of their profile: write [profiles.NAME] seeds instead."
    if tune is None:
        return
    for key in ("values", "over", "seeds"):
        yield from _twice(f"[tune] {key}", getattr(tune, key))
    for axis, label in tune.at.items():
        yield from _unknown(experiment, "tune.at", axis, label)
    if tune.key in NOT_TO_SEARCH:
        yield f"tune.key = {tune.key!r} cannot be searched."
    if tune.key in flat(experiment.run):
        yield f"[run] sets {tune.key}, but the search does: write its values in [tune] values, and leave it out there."


def _cells(experiment: Experiment) -> Iterator[str]:
    for skipped in experiment.skip:
        if {*skipped} <= {WHY}:
            yield "skip names no label: it would leave out every cell."
        for axis, label in skipped.items():
            if axis != WHY:
                yield from _unknown(experiment, "skip", axis, label)


def _set_once(experiment: Experiment) -> Iterator[str]:
    changes = {
        f"{axis} = {label!r}": of
        for axis, labels in experiment.axes.items()
        for label, of in labels.items()
    } | {f"profile {name}": profile.set for name, profile in experiment.profiles.items()}  # fmt: skip
    tune = experiment.tune
    for key, whose in {"run.seed": "the seeds of the profile", **({tune.key: "the search"} if tune else {})}.items():
        for name, of in changes.items():
            if key in flat(of):
                yield f"{name} sets {key}, and so do {whose}: which of the two counts? Leave one of them out."


def _meeting(experiment: Experiment) -> Iterator[str]:
    """Labels of two axes that set one key, or a table and a key of it, differently in one cell: one of them would be
    lost, under the name of both. A later axis may take a table away."""
    axes = experiment.axes.items()
    for (one, ours), (other, theirs) in itertools.combinations(axes, 2):
        for label, beside in itertools.product(ours, theirs):
            for (key, value), (later, its) in itertools.product(ours[label].items(), theirs[beside].items()):
                fine = not _meet(key, later) or its == {} or _nested(key, value) == _nested(later, its)
                if not fine and not experiment.skips({one: label, other: beside}):
                    yield (
                        f"{one} = {label!r} sets {key} = {value!r}, and {other} = {beside!r} sets {later} = "
                        f"{its!r}: which of the two counts? Leave it out of one axis"
                        + (", or set a table's keys by their dotted keys." if dict in (type(value), type(its)) else ".")
                    )
    common = [*flat(experiment.run), *(key for profile in experiment.profiles.values() for key in profile.set)]
    before: list[str] = []
    for axis, labels in axes:
        for label, key in [(name, key) for name, of in labels.items() for key in of if of[key] == {}]:
            others = [of for of in common if _meet(key, of)]
            if others or not any(_meet(key, of) for of in before):
                yield (
                    f"{axis} = {label!r} has {key} = {{}}, which takes away a table that an earlier axis made; "
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
