"""A site's own examples for a round by hand; the file's columns determine their kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedlora.data import TextData, read_classification, read_instructions
from fedlora.data.labels import given, shown
from fedlora.data.readers import CHAT, open_table
from fedlora.errors import ConfigError
from fedlora.training.class_weights import weigh_classes
from fedlora.training.settings import ClassWeights

Kind = Literal["classes", "instructions", "conversations"]


@dataclass(frozen=True)
class Columns:
    """Column names. messages: for conversations; None: the default."""

    text: str = "text"
    pair: str | None = None
    label: str = "label"
    prompt: str = "prompt"
    response: str = "response"
    messages: str | None = None

    @property
    def talks(self) -> str:
        return self.messages or CHAT


def kind_of(data: Path, columns: Columns) -> Kind:
    """The kind of a file's examples: classes if it has such a column, otherwise answers or conversations.

    Raises:
        ConfigError: none of the columns exists. DataError: as in the readers.
    """
    there = list(open_table(data, []).columns)
    if columns.label in there:
        return "classes"
    if columns.response not in there and columns.talks not in there:
        raise ConfigError(
            f"{data} has no column {columns.label!r} (classes), {columns.response!r} (answers) or {columns.talks!r} "
            f"(conversations): {there}."
        )
    talks = columns.messages is not None or not {columns.prompt, columns.response} <= set(there)
    return "conversations" if talks else "instructions"


def read_examples(data: Path, columns: Columns, kind: Kind, labels: Sequence[str] | None = None) -> TextData:
    """A file's examples of that kind.

    Args:
        labels: all sites' classes in one order; None: the file's own, which must then be numbers from 0 on.

    Raises:
        ConfigError: the classes cannot be used in a federation. DataError: as in the readers.

    Example:
        >>> columns = Columns()
        >>> data = read_examples(Path("train.jsonl"), columns, kind_of(Path("train.jsonl"), columns), ["no", "yes"])
    """
    if kind != "classes":
        return read_instructions(
            data, prompt=columns.prompt, response=columns.response, messages=columns.messages
        )  # fmt: skip
    examples = read_classification(
        data, text=columns.text, label=columns.label, pair=columns.pair, label_names=labels, key="--labels"
    )
    found = examples.label_names
    if len(found) < 2:
        raise ConfigError(
            f"{data}: every example has the same class, {found[0]!r}, but a classifier needs two or more. If other "
            f"sites have more, name all classes with --labels, the same at every site."
        )
    if labels is None and found != tuple(str(k) for k in range(len(found))):
        raise ConfigError(
            f"{data} has the classes {shown(found)}, but another site may have other classes or number them "
            f"differently, and then the classifiers would not add up. Give --labels, the same at every site, with "
            f"the classes of all sites; if there are no more, {given('--labels', found)}."
        )
    return examples


def parse_class_weights(text: str, examples: TextData) -> ClassWeights:
    """Class weights from "balanced" or "NAME=WEIGHT,...". Raises `ConfigError`, also for an unknown class."""
    weights: ClassWeights = "balanced"
    if text != "balanced":
        pairs = [part.rpartition("=") for part in text.split(",")]
        try:
            weights = {name.strip(): float(weight) for name, _, weight in pairs}
        except ValueError as error:
            raise ConfigError(f"--class-weights must be balanced or NAME=WEIGHT,...; got {text!r}.") from error
        if not all(0 < weight < float("inf") for weight in weights.values()):
            raise ConfigError(f"--class-weights: each weight must be a finite number > 0; got {text!r}.")
    try:
        weigh_classes(examples, weights)
    except ConfigError as error:
        raise ConfigError(str(error).replace("train.class_weights", "--class-weights")) from error
    return weights
