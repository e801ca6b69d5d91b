"""Small files in the schema of the real benchmarks: GLUE, natural instructions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

Rows = list[dict[str, Any]]

# Columns of nyu-mll/glue, and its classes in the order of its ClassLabel, as the data set's page has them.
SCHEMA: dict[str, tuple[str, str | None, tuple[str, ...]]] = {
    "sst2": ("sentence", None, ("negative", "positive")),
    "qqp": ("question1", "question2", ("not_duplicate", "duplicate")),
    "qnli": ("question", "sentence", ("entailment", "not_entailment")),
    "mnli": ("premise", "hypothesis", ("entailment", "neutral", "contradiction")),
}


def glue_rows(task: str, count: int, prefix: str = "x") -> Rows:
    """Rows of a GLUE task, the classes in turn."""
    text, pair, names = SCHEMA[task]
    second = {} if pair is None else {pair: "{} second {}"}
    return [
        {text: f"{prefix} first {k}", **{c: form.format(prefix, k) for c, form in second.items()}, "idx": k}
        | {"label": k % len(names)}
        for k in range(count)
    ]


def write_glue(root: Path, task: str, train: int = 60, validation: int = 20) -> Path:
    """ROOT/glue/TASK/{train,validation}.jsonl. Returns the root."""
    folder = root / "glue" / task
    folder.mkdir(parents=True)
    for name, rows in (("train", glue_rows(task, train, "t")), ("validation", glue_rows(task, validation, "v"))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def task_file(count: int = 100, category: str = "Reasoning", **fields: Any) -> dict[str, Any]:
    """A task of natural-instructions v2, with the fields of the real files that we read and some that we do not."""
    instances = [{"id": f"t-{k}", "input": f"Is {k} even?", "output": [str(k % 2 == 0)]} for k in range(count)]
    return {
        "Contributors": ["nobody"], "Source": ["here"], "Categories": [category], "Reasoning": [],
        "Definition": ["Say whether the number is even."], "Input_language": ["English"],
        "Output_language": ["English"], "Positive Examples": [], "Negative Examples": [], "Instances": instances,
    } | fields  # fmt: skip


def write_tasks(root: Path, tasks: Mapping[str, dict[str, Any]]) -> Path:
    """ROOT/superni/NAME.json. Returns that folder."""
    folder = root / "superni"
    folder.mkdir(parents=True, exist_ok=True)
    for name, raw in tasks.items():
        (folder / f"{name}.json").write_text(json.dumps(raw))
    return folder


def one_line(error: pytest.ExceptionInfo[Exception]) -> str:
    """What the command line would print: a single line, not empty."""
    text = str(error.value)
    assert text and "\n" not in text
    return text
