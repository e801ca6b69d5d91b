"""GLUE's sentence tasks, from local JSONL files or the Hugging Face hub: columns, labels and official test sets.

Local files lie under ROOT/glue/TASK/{train,validation}.jsonl with the columns of the hub's `nyu-mll/glue`. The official
validation files are the test sets here, since GLUE's own test labels are not public; choose on a share of train.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from fedlora.data.hub import read_hub
from fedlora.data.text import TextData, read_classification
from fedlora.errors import DataError

GlueTask = Literal["sst2", "qqp", "qnli", "mnli"]
HUB = "nyu-mll/glue"


@dataclass(frozen=True)
class Columns:
    """Of one task: its sentence, the second one, its classes by index, and the hub's names of its test sets."""

    text: str
    pair: str | None
    label_names: tuple[str, ...]
    tests: tuple[str, ...] = ("validation",)


GLUE: Mapping[str, Columns] = MappingProxyType(
    {
        "sst2": Columns("sentence", None, ("negative", "positive")),
        "qqp": Columns("question1", "question2", ("not_duplicate", "duplicate")),
        "qnli": Columns("question", "sentence", ("entailment", "not_entailment")),
        "mnli": Columns(
            "premise", "hypothesis", ("entailment", "neutral", "contradiction"),
            tests=("validation_matched", "validation_mismatched"),
        ),
    }
)  # fmt: skip


def read_glue(task: GlueTask, root: Path | None) -> tuple[TextData, dict[str, TextData]]:
    """(train, test set by name) of a task: from files below `root`, or from the hub where it is None.

    A local copy has one test set, "validation"; the hub has two for mnli, matched and mismatched.

    Raises:
        DataError: no such files, or the hub cannot be reached.

    Example:
        >>> train, tests = read_glue("sst2", Path("root"))  # root/glue/sst2/train.jsonl, validation.jsonl
        >>> train.label_names, list(tests)
        (('negative', 'positive'), ['validation'])
    """
    columns = GLUE[task]
    if root is None:
        splits = {
            name: read_hub(
                HUB, task, name, text=columns.text, label="label", pair=columns.pair, label_names=columns.label_names
            )
            for name in ("train", *columns.tests)
        }
        return splits.pop("train"), splits
    folder = root / "glue" / task
    if not folder.is_dir():
        raise DataError(
            f"{folder} does not exist: --data-root must hold glue/{task}/train.jsonl and validation.jsonl. "
            f"Leave --data-root out to take {HUB} from the Hugging Face hub."
        )
    train, test = (
        read_classification(
            folder / f"{name}.jsonl", text=columns.text, label="label", pair=columns.pair,
            label_names=columns.label_names,
        )
        for name in ("train", "validation")
    )  # fmt: skip
    return train, {"validation": test}
