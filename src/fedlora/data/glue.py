"""GLUE's sentence tasks, from local JSONL files or the Hugging Face hub: columns, labels and official test sets.

Local files are ROOT/glue/TASK/{train,validation}.jsonl with the columns of the hub's `nyu-mll/glue`; for mnli also
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
HUB = "nyu-mll/glue"


@dataclass(frozen=True)
class Columns:
    """One task's columns: sentence, second sentence, classes by index, and the hub's names for its test sets."""

    text: str
    pair: str | None
    label_names: tuple[str, ...]
    tests: tuple[str, ...] = ("validation",)


GLUE: Mapping[str, Columns] = {
    "sst2": Columns("sentence", None, ("negative", "positive")),
    "qqp": Columns("question1", "question2", ("not_duplicate", "duplicate")),
    "qnli": Columns("question", "sentence", ("entailment", "not_entailment")),
    "mnli": Columns(
        "premise", "hypothesis", ("entailment", "neutral", "contradiction"),
        tests=("validation_matched", "validation_mismatched"),
    ),
}  # fmt: skip


def read_glue(task: GlueTask, root: Path | None, revision: str | None = None) -> tuple[TextData, dict[str, TextData]]:
    """(train, test set by name) for a task, from files below `root`, or from the hub if it is None.

    A local copy has one test set, "validation"; for mnli the hub has two, matched and mismatched, and a local copy with
    validation_mismatched.jsonl too. revision: the hub's commit; None: the newest.

    Raises:
        DataError: no such files, a row without a class, or the hub cannot be reached.

    Example:
        >>> train, tests = read_glue("sst2", Path("root"))  # root/glue/sst2/train.jsonl, validation.jsonl
        >>> train.label_names, list(tests)
        (('negative', 'positive'), ['validation'])
    """
    tests = GLUE[task].tests
    if root is None:
        at = "" if revision is None else f"&revision={revision}"
        sources = {name: f"hf://{HUB}?config={task}&split={name}{at}" for name in ("train", *tests)}
    else:
        folder = root / "glue" / task
        if not folder.is_dir():
            raise DataError(f"{folder} does not exist: --data-root holds glue/; without it {HUB} is read from the hub.")
        further = [name for name in tests[1:] if (folder / f"{name}.jsonl").is_file()]
        sources = {name: str(folder / f"{name}.jsonl") for name in ("train", "validation", *further)}
    found = {name: _read(task, source) for name, source in sources.items()}
    return found.pop("train"), found


def _read(task: GlueTask, source: str) -> TextData:
    """Its labels are classes by index in a file, and by name on the hub."""
    columns = GLUE[task]
    names = columns.label_names
    asked = [columns.text, "label", *([columns.pair] if columns.pair else [])]
    table = open_table(source, asked).having(asked)
    known: dict[object, int] = {key: k for k, name in enumerate(names) for key in (k, name)}
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


__all__ = ["GLUE", "Columns", "GlueTask", "read_glue"]
