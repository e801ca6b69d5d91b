"""Reads a run's files of text, so that all of them have the same classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedlora.data import TextData, demo_data, read_classification, read_instructions
from fedlora.data.labels import LabelError, given, in_order, look_alike, shown
from fedlora.errors import ConfigError, DataError
from fedlora.runs.config import RunConfig


def read_agreed(config: RunConfig, paths: Sequence[str], begun_with: Sequence[str] = ()) -> dict[str, TextData]:
    """Path -> its examples. All files use the same classes: data.label_names, otherwise those that the run began with,
    otherwise all that occur in any file."""

    d = config.data

    def read(path: str, names: Sequence[str] | None = None) -> TextData:
        if path == "demo":
            demo = demo_data()
            if d.labels and tuple(d.labels) != demo.label_names:
                raise ConfigError(
                    f"data.label_names = {d.labels}, but the demo's classes are {list(demo.label_names)}."
                )
            return demo
        if config.model.task == "sequence-classification":
            try:
                return read_classification(
                    path, text=d.text, label=d.label, text_pair=d.pair, label_names=d.labels or names, agreed=True,
                    key="data.label_names",
                )  # fmt: skip
            except LabelError as error:
                if d.labels or not begun_with:
                    raise
                raise DataError(
                    f"{error.found} is not among the {len(begun_with)} classes that the run began with, "
                    f"{shown(begun_with)}. That would mix two runs. Restore the old file, or choose another --out."
                ) from error
        return read_instructions(path, prompt=d.prompt, response=d.response, messages=d.messages)

    if begun_with and not d.labels:
        return {path: read(path, begun_with) for path in paths}
    found = {path: read(path) for path in paths}
    if len({data.label_names for data in found.values()}) == 1:
        return found
    names = _all_classes({path: data.label_names for path, data in found.items()})
    return {path: read(path, names) for path in paths}


def _all_classes(found: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The classes of several files. Raises `ConfigError` if they may be the same classes, written differently."""
    names = in_order(name for classes in found.values() for name in classes)
    cure = f"If they are separate classes, set {given('data.labels', names)}."
    if same := look_alike(names):
        holders = [next(path for path, classes in found.items() if spelt in classes) for spelt in same]
        raise ConfigError(
            f"two labels look alike: {holders[0]} has {same[0]!r}, and {holders[1]} has {same[1]!r}. Write them the "
            f"same way in all files. {cure}"
        )
    widest, most = max(found.items(), key=lambda item: len(item[1]))
    for path, classes in found.items():
        if not set(classes) & set(most):
            raise ConfigError(
                f"the files have different label names: {path} has {shown(tuple(classes))}, and {widest} has "
                f"{shown(tuple(most))}, with none in common. If these are the same classes, give them the same names "
                f"in all files. {cure}"
            )
    return names
