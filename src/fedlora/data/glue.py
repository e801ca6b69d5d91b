"""GLUE's sentence tasks, from local JSONL files or the Hugging Face hub: columns, labels and official test sets.

Local files are ROOT/glue/TASK/{train,validation}.jsonl with the columns of the hub's `nyu-mll/glue`; for mnli also
validation_mismatched.jsonl, if it is there. We test on the official validation files, since GLUE's own test labels are
not public; select models on a share of train.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from fedlora.data.labels import LabelError
from fedlora.data.readers import read_classification
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


GLUE: Mapping[str, Columns] = MappingProxyType({
    "sst2": Columns("sentence", None, ("negative", "positive")),
    "qqp": Columns("question1", "question2", ("not_duplicate", "duplicate")),
    "qnli": Columns("question", "sentence", ("entailment", "not_entailment")),
    "mnli": Columns(
        "premise", "hypothesis", ("entailment", "neutral", "contradiction"),
        tests=("validation_matched", "validation_mismatched"),
    ),
})  # fmt: skip


def read_glue(task: GlueTask, root: Path | None, revision: str | None = None) -> tuple[TextData, dict[str, TextData]]:
    """(train, test set by name) for a task, from files below `root`, or from the hub if it is None.

    A local copy has one test set, "validation"; for mnli the hub has two, matched and mismatched, and a local copy with
    validation_mismatched.jsonl too. revision: the hub's commit; None: the newest.

    Raises:
        DataError: no such files, or the hub cannot be reached.

    Example:
        >>> train, tests = read_glue("sst2", Path("root"))  # root/glue/sst2/train.jsonl, validation.jsonl
        >>> train.label_names, list(tests)
        (('negative', 'positive'), ['validation'])
    """
    columns = GLUE[task]
    if root is None:
        at = "" if revision is None else f"&revision={revision}"
        sources = {name: f"hf://{HUB}?config={task}&split={name}{at}" for name in ("train", *columns.tests)}
    else:
        folder = root / "glue" / task
        if not folder.is_dir():
            raise DataError(
                f"{folder} does not exist: --data-root must hold glue/{task}/train.jsonl and validation.jsonl; without "
                f"it, {HUB} is taken from the hub."
            )
        further = [name for name in columns.tests[1:] if (folder / f"{name}.jsonl").is_file()]
        sources = {name: str(folder / f"{name}.jsonl") for name in ("train", "validation", *further)}
    read = partial(
        read_classification, text=columns.text, label="label", text_pair=columns.pair, label_names=columns.label_names
    )
    try:
        found = {name: read(source) for name, source in sources.items()}
    except LabelError as error:
        raise DataError(
            f"{error.found} is not a class of data.task = {task!r}. GLUE's test sets have -1 for labels: use its "
            f"training and validation files, or drop the row."
        ) from error
    return found.pop("train"), found


__all__ = ["GLUE", "Columns", "GlueTask", "read_glue"]
