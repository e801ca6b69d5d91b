"""GLUE's sentence tasks from JSONL files: columns, labels and official test sets.

The files are ROOT/glue/TASK/{train,validation}.jsonl with the columns of the hub's `nyu-mll/glue`; for mnli also
validation_mismatched.jsonl, if it is there. We test on the official validation files, since GLUE's own test labels are
not public; select models on a share of train.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedlora.data.tables import open_table
from fedlora.data.text import TextData
from fedlora.errors import DataError

GlueTask = Literal["sst2", "qqp", "qnli", "mnli"]


@dataclass(frozen=True)
class Columns:
    """One task's columns: sentence, second sentence, and classes by index."""

    text: str
    pair: str | None
    label_names: tuple[str, ...]


GLUE: Mapping[str, Columns] = {
    "sst2": Columns("sentence", None, ("negative", "positive")),
    "qqp": Columns("question1", "question2", ("not_duplicate", "duplicate")),
    "qnli": Columns("question", "sentence", ("entailment", "not_entailment")),
    "mnli": Columns("premise", "hypothesis", ("entailment", "neutral", "contradiction")),
}


def read_glue(task: GlueTask, root: Path) -> tuple[TextData, dict[str, TextData]]:
    """(train, test set by name) for a task, from files below `root`. One test set is "validation"; mnli may have
    "validation_mismatched" too.

    Raises:
        DataError: no such files, or a row without a class.

    Example:
        >>> train, tests = read_glue("sst2", Path("root"))  # root/glue/sst2/train.jsonl, validation.jsonl
        >>> train.label_names, list(tests)
        (('negative', 'positive'), ['validation'])
    """
    folder = root / "glue" / task
    names = ["train", "validation"]
    if task == "mnli" and (folder / "validation_mismatched.jsonl").is_file():
        names.append("validation_mismatched")
    found = {name: _read(task, folder / f"{name}.jsonl") for name in names}
    return found.pop("train"), found


def _read(task: GlueTask, source: Path) -> TextData:
    columns = GLUE[task]
    names = columns.label_names
    asked = [columns.text, "label", *([columns.pair] if columns.pair else [])]
    table = open_table(source, asked).having(asked)
    known: dict[object, int] = {k: k for k in range(len(names))}
    cells = table.cells("label")
    if odd := next((cell for cell in cells if cell[1] not in known), None):
        raise DataError(
            f"{table.name}, {odd[0]}: label {odd[1]!r} is no class of data.task = {task!r}. GLUE's test sets have -1: "
            f"use validation."
        )
    return TextData(
        "classification", table.texts(columns.text), table.texts(columns.pair) if columns.pair else None,
        tuple(known[value] for _, value in cells), label_names=names,
    )  # fmt: skip
