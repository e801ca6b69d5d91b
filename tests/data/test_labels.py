"""A column of labels as classes: one rule, for a file, an object of `datasets` and a data set of the hub.

Kinds of evidence: *property* (drawn labels: each row has the class that is written there), *oracle* (by hand).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlora.data import read_classification
from fedlora.data.labels import decode_labels, in_order
from fedlora.errors import DataError

Labels = list[Any]
GOOD: list[tuple[Labels, list[str] | None, tuple[int, ...], tuple[str, ...]]] = [
    ([2, 0], None, (1, 0), ("0", "2")),
    (["2", "0"], None, (1, 0), ("0", "2")),
    ([" 10", "9"], None, (1, 0), ("9", "10")),
    (["10", "02"], None, (1, 0), ("02", "10")),
    (["+1", "0"], None, (1, 0), ("0", "+1")),
    ([10**17, 3], None, (1, 0), ("3", "100000000000000000")),
    (["9" * 5000, "8" * 5000], None, (1, 0), ("8" * 5000, "9" * 5000)),
    (["-1", "+1"], ["-1", "+1"], (0, 1), ("-1", "+1")),
    (["10", "b", "9"], ["9", "10", "b"], (1, 2, 0), ("9", "10", "b")),
    (["b", "a", "b"], None, (1, 0, 1), ("a", "b")),
    ([True, False], None, (1, 0), ("false", "true")),
    ([" a", "a", "b "], [" a", "a", "b"], (0, 1, 2), (" a", "a", "b")),
    ([1, "0", "b"], ["b", "a"], (1, 0, 0), ("b", "a")),
    ([2, "1"], ["1", "2"], (1, 0), ("1", "2")),
    ([-1, 1], ["-1", "0", "1"], (0, 2), ("-1", "0", "1")),
]
BAD: list[tuple[Labels, list[str] | None, str]] = [
    (["a", "c"], ["a", "b"], r"row 2, line 2: label 'c' .* 2 classes of label_names, \['a', 'b'\]"),
    ([0, 2], ["a", "b"], "row 2, line 2: label '2'"),
    ([0], ["1", "2"], "label '0' is not among"),
    ([0, -1], None, r"row 2, line 2: label -1 .*label_names = \[\"-1\", \"0\"\]"),
    (["+1", "-1"], None, r"row 2, line 2: label -1 .*label_names = \[\"-1\", \"\+1\"\]"),
    (["1", "+1", "0"], None, r"'1' \(row 1, line 1\) and '\+1' \(row 2, line 2\) look alike"),
    (["2", "1", "01"], None, r"'1' \(row 2, line 2\) and '01' \(row 3, line 3\)"),
    ([0, 1, 1.0], None, r"'1' \(row 2, line 2\) and '1.0' \(row 3, line 3\)"),
    (["0", "-0"], None, r"'0' \(row 1, line 1\) and '-0' \(row 2, line 2\)"),
    (["yes", "no", "Yes"], None, r"'yes' .* and 'Yes' \(row 3, line 3\).*label_names = \[\"Yes\", \"no\", \"yes\"\]"),
    (["not sure", "not  sure"], None, "look alike"),
    (["caf\u00e9", "cafe\u0301"], None, "look alike"),
    (["stra\u00dfe", "STRASSE"], None, "look alike"),
    (["a\u200bb", "ab"], None, "look alike"),
    (["\uff11", "1"], None, "numbers .* names"),
    ([1], ["+1", "+2"], "label '1' is not among"),
    (["+1"], ["no", "yes"], r"label '\+1' is not among"),
    ([-1], ["a", "b"], "label '-1' is not among"),
    ([0, 1.5], None, "row 2, line 2: label 1.5 "),
    (["3.25"], None, "no whole number"),
    (["pos", 1], None, r"numbers \(row 2, line 2: '1'\).*names \(row 1, line 1: 'pos'\)"),
    ([0, 1, True], None, r"numbers \(row 1, line 1: '0'\) .*names \(row 3, line 3: 'true'\)"),
    ([True], ["no", "yes"], "label 'true' is not"),
    ([True], ["1", "0"], "label 'true' is not"),
    ([["a"]], None, r"a label must .*got \['a'\]"),
    (list(range(10_001)), None, "10001 classes"),
    (["a"], ["a", "a"], "different names"),
    (["a"], [], "at least one"),
]


def as_file(folder: Path, labels: Labels) -> Path:
    rows = [{"t": "x", "y": label} for label in labels]
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "d.jsonl"


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_each_row_has_the_class_that_is_written_there(data: st.DataObject) -> None:
    """Words, whole numbers or truths; with and without the names, agreed upon or not."""
    kinds = [st.sampled_from(["b", "a", " c", "True ", "x" * 99]), st.integers(0, 9999), st.booleans()]
    values: Labels = data.draw(st.lists(data.draw(st.sampled_from(kinds)), min_size=1, max_size=9))
    written = [str(value).lower() if isinstance(value, bool) else str(value).strip() for value in values]
    named = data.draw(st.none() | st.permutations([*sorted(set(written)), "more"]))
    cells = [(f"row {k}", value) for k, value in enumerate(values)]
    labels, names = decode_labels("d", cells, named, agreed=data.draw(st.booleans()))
    assert [names[k] for k in labels] == written
    assert names == (tuple(named) if named else in_order(written))


def test_what_is_a_class(tmp_path: Path) -> None:
    for values, names, labels, label_names in GOOD:
        read = read_classification(as_file(tmp_path, values), text="t", label="y", label_names=names)
        assert (read.labels, read.label_names) == (labels, label_names), values
    for values, names, said in BAD:
        with pytest.raises(DataError, match=said) as error:
            read_classification(as_file(tmp_path, values), text="t", label="y", label_names=names)
        assert "\n" not in str(error.value)


def test_parties_that_agreed_take_no_index(tmp_path: Path) -> None:
    """For whose index 0 was nobody could tell; the message has the key that the user typed."""
    for value, named in (("delivry", ""), (0, "")):
        with pytest.raises(DataError, match=rf"row 1, line 1: label .* data\.label_names.*{named}") as error:
            read_classification(
                as_file(tmp_path, [value]), text="t", label="y", label_names=["billing", "delivery"], agreed=True,
                key="data.label_names",
            )  # fmt: skip
        assert "label_names" not in str(error.value).replace("data.label_names", "").replace("data.label_names", "")


def test_a_data_set_is_read_as_a_file_with_its_rows_is(tmp_path: Path) -> None:
    """Errors included, but for the line."""
    datasets = pytest.importorskip("datasets")

    def read(source: Any, names: Any) -> Any:
        try:
            return read_classification(source, text="t", label="y", label_names=names)
        except DataError as error:
            return re.sub(r", line \d", "", str(error).replace(str(source), "the data set"))

    for values, names in (
        ([True, False], None), ([True, False], ["no", "yes"]), (["10", "9"], None), ([1, 0], ["1", "0"]),
        (["b", "a "], None), ([2, 0], None), (["pos", "1"], None), ([0.0, 1.0], None), ([1, -1], None),
    ):  # fmt: skip
        rows = datasets.Dataset.from_dict({"t": ["x", "x"], "y": values})
        assert read(rows, names) == read(as_file(tmp_path, values), names), values
