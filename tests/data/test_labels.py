"""A column of labels as classes: one rule, for a file, an object of `datasets` and a data set of the hub.

Kinds of evidence: *property* (drawn labels: each row has the class that is written there), *oracle* (by hand).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedlora.data import read_classification
from fedlora.errors import DataError

Labels = list[Any]
GOOD: list[tuple[Labels, list[str] | None, tuple[int, ...], tuple[str, ...]]] = [
    ([2, 0], None, (1, 0), ("0", "2")),
    (["10", "02"], None, (1, 0), ("02", "10")),
    (["-1", "+1"], ["-1", "+1"], (0, 1), ("-1", "+1")),
    (["10", "b", "9"], ["9", "10", "b"], (1, 2, 0), ("9", "10", "b")),
    (["b", "a", "b"], None, (1, 0, 1), ("a", "b")),
    ([True, False], None, (1, 0), ("false", "true")),
    ([" a", "a", "b "], [" a", "a", "b"], (0, 1, 2), (" a", "a", "b")),
]
BAD: list[tuple[Labels, list[str] | None, str]] = [
    (["a", "c", "b", "c", "d"], ["a", "b"], r"row 2, line 2: label 'c' .* \(3 such rows\)"),
    ([0, -1], None, r"row 2, line 2: label -1 .*label_names = \[\"-1\", \"0\"\]"),
    (["1", "+1", "0"], None, r"'1' \(row 1, line 1\) and '\+1' \(row 2, line 2\) look alike"),
    (["yes", "no", "Yes"], None, r"'yes' .* and 'Yes' \(row 3, line 3\).*label_names = \[\"Yes\", \"no\", \"yes\"\]"),
    (["caf\u00e9", "cafe\u0301"], None, "look alike"),
    ([0, 1.5], None, "row 2, line 2: label 1.5 "),
    ([["a"]], None, r"a label must .*got \['a'\]"),
    (list(range(10_001)), None, "10001 classes"),
    (["a"], ["a", "a"], "different names"),
]


def as_file(folder: Path, labels: Labels) -> Path:
    rows = [{"t": "x", "y": label} for label in labels]
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "d.jsonl"


def test_what_is_a_class(tmp_path: Path) -> None:
    for values, names, labels, label_names in GOOD:
        read = read_classification(as_file(tmp_path, values), text="t", label="y", label_names=names)
        assert (read.labels, read.label_names) == (labels, label_names), values
    for values, names, said in BAD:
        with pytest.raises(DataError, match=said) as error:
            read_classification(as_file(tmp_path, values), text="t", label="y", label_names=names)
        assert "\n" not in str(error.value)
