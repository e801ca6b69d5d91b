"""The value `TextData`: what it refuses, and that select, concat and digest treat examples as wholes.

Kind of evidence: *oracle* (by hand; the hash that the docstring of `digest` writes down).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedlora.data import TextData, read_classification, read_instructions
from fedlora.data.rows import Rows
from fedlora.errors import DataError

FIELDS = ("text", "pair", "labels", "responses", "references", "droppable", "history")
CLASSES = TextData("classification", ("a", "b", "c"), ("p", "q", "r"), (0, 1, 0), None, ("x", "y"))
ASKED = TextData(
    "instruction", ("a", "b"), responses=("1", "2"), references=(("1",), ("2", "two")), droppable=((0, 1), (0, 0)),
    history=((("system", "s"),), ()),
)  # fmt: skip


def examples(data: TextData) -> list[tuple[Any, ...]]:
    """All that belongs to each example."""
    given = [getattr(data, name) for name in FIELDS]
    return [tuple(None if values is None else values[k] for values in given) for k in range(len(data))]


@pytest.mark.parametrize("data", [CLASSES, ASKED], ids=["classes", "asked"])
def test_select_and_concat_take_whole_examples(data: TextData) -> None:
    """In the asked order, with repeats; the whole from its parts, empty ones among them; equal data are one key."""
    for wanted in ([], [1, 0, 1], [0]):
        chosen = data.select(np.array(wanted, dtype=np.int32))
        assert examples(chosen) == [examples(data)[k] for k in wanted]
        assert (chosen.kind, chosen.label_names) == (data.kind, data.label_names)
    whole = TextData.concat([data.select([0]), data.select([]), data.select(range(1, len(data)))])
    assert whole == data and hash(whole) == hash(data) and whole.digest() == data.digest()


@pytest.mark.parametrize(
    "data", [CLASSES, replace(CLASSES, pair=None), ASKED, ASKED.select([])], ids=["pairs", "classes", "asked", "none"]
)
def test_digest_is_the_documented_hash(data: TextData) -> None:
    """The lines that the docstring of `digest` lists, written here by hand: every field, in order."""
    lines = [json.dumps([data.kind, data.label_names])]
    lines += [json.dumps([text, pair, label, said]) for text, pair, label, said, *_ in examples(data)]
    for name in ("references", "droppable", "history"):
        if getattr(data, name) is not None:
            lines.append(json.dumps([name, getattr(data, name)]))
    assert data.digest() == hashlib.sha256("".join(line + "\n" for line in lines).encode()).hexdigest()


def test_concat_joins_parts_of_one_task_only() -> None:
    """Nothing is dropped or made up; but no history is an empty one."""
    bare = TextData("instruction", ("d",), responses=("4",))
    talk = replace(bare, history=((("user", "Hi"),),))
    assert TextData.concat([bare, talk]).history == ((), (("user", "Hi"),))
    with pytest.raises(DataError, match="at least one part"):
        TextData.concat([])
    for other in (
        replace(CLASSES, label_names=("x", "z")), replace(CLASSES, pair=None), bare,
    ):  # fmt: skip
        with pytest.raises(DataError, match="got 2 different"):
            TextData.concat([CLASSES, other])


def test_what_is_no_data_is_refused() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"text": ("a", "b"), "labels": (0,), "label_names": ("x",)}, r"'text': 2, 'labels': 1"),
        ({"labels": (0,)}, "and 0 label_names"),
        ({"labels": (-1,), "label_names": ("x",)}, "example 0 "),
        *(
            ({"labels": (0,), "label_names": ("x",), name: value}, "references, droppable, history")
            for name, value in (("references", (("r",),)), ("droppable", ((0, 1),)), ("history", ((),)))
        ),
        ({"kind": "instruction"}, "'instruction' with responses"),
        ({"kind": "regression"}, "'regression'"),
    ]
    for fields, said in wrong:
        with pytest.raises(DataError, match=said):
            TextData(**({"kind": "classification", "text": ("a",)} | fields))
    for indices in ([3], [-1], np.array([True, False, True]), [0.0], [[0]]):
        with pytest.raises(DataError, match=r"whole numbers in 0\.\.2"):
            CLASSES.select(indices)  # type: ignore[arg-type]


def test_lists_become_tuples_of_plain_values() -> None:
    data = TextData("classification", ["a", "b"], labels=np.array([1, 0]), label_names=["x", "y"])  # type: ignore[arg-type]
    assert data == TextData("classification", ("a", "b"), labels=(1, 0), label_names=("x", "y")) and len(data) == 2
    assert data.labels is not None and type(data.labels[0]) is int
    assert ASKED.messages(0) == (("system", "s"), ("user", "a"), ("assistant", "1"))


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_rows_are_read_again_as_they_were(suffix: str, tmp_path: Path) -> None:
    """Classes, pairs, instructions and (not in CSV) conversations, with quotes, line breaks and umlauts."""
    words, names = ('a "b", c', "Wörter\nviele", "plain"), ("no", "yes")
    pairs = TextData("classification", words, pair=words[::-1], labels=(0, 1, 0), label_names=names)
    single = TextData("classification", words, labels=(0, 1, 0), label_names=names)
    asked = TextData("instruction", words, responses=words[::-1])
    talk = TextData("instruction", words, responses=words, history=((("system", "brief"),), (), ()))
    for data in (pairs, single, asked, *([talk] if suffix != ".csv" else [])):
        Rows(Rows.of(data).rows, suffix).write(file := tmp_path / f"rows{suffix}")
        if data.labels is None:
            assert read_instructions(file) == data
        else:
            pair = None if data.pair is None else "pair"
            assert read_classification(file, text="text", label="label", text_pair=pair, label_names=names) == data


def test_rows_left_of_a_file_keep_their_columns(tmp_path: Path) -> None:
    """Two of four rows are held out; the others are as in the file, with the column that nobody named."""
    file = tmp_path / "mine.parquet"
    rows = [{"text": f"word {k}", "label": "no", "id": k} for k in range(4)]
    Rows(rows, ".parquet").write(file)
    whole = TextData("classification", tuple(str(r["text"]) for r in rows), labels=(0,) * 4, label_names=("no",))
    assert list(Rows.left(file, whole, whole.select([3, 1])).rows) == [rows[1], rows[3]]
