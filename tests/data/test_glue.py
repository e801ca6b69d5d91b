"""GLUE from its own files and from the hub.

Kinds of evidence: *oracle* (small files written here in the schema of the real ones, and what must come out of them,
by hand), *contract* (bad input is one line). No network: the library `datasets` is a stand-in.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedlora.data import GLUE, TextData, read_glue
from fedlora.errors import DataError
from support.benchmark_files import SCHEMA, glue_rows, one_line, write_glue
from support.stand_in_hub import Hub, HubRows


class TestGlue:
    def test_the_table_is_the_hubs(self) -> None:
        """Columns and classes of nyu-mll/glue, as SCHEMA above has them from the data set's page."""
        assert {task: (c.text, c.pair, c.label_names) for task, c in GLUE.items()} == SCHEMA

    def test_local_files(self, tmp_path: Path) -> None:
        """Every row of the two files, by hand; the one test set is the official validation file."""
        for task, (_, second, names) in SCHEMA.items():
            train, tests = read_glue(task, write_glue(tmp_path, task, train=7, validation=5))  # type: ignore[arg-type]
            for data, count, prefix in ((train, 7, "t"), (tests["validation"], 5, "v")):
                pairs = None if second is None else tuple(f"{prefix} second {k}" for k in range(count))
                assert data == TextData(
                    "classification", tuple(f"{prefix} first {k}" for k in range(count)), pairs,
                    tuple(k % len(names) for k in range(count)), None, names,
                )  # fmt: skip
            assert list(tests) == ["validation"]

    def test_no_folder_and_no_test_file(self, tmp_path: Path) -> None:
        """The message says where it looked and what else one can do; both files are needed."""
        with pytest.raises(DataError, match=r"glue/sst2 does not exist.*--data-root") as error:
            read_glue("sst2", tmp_path)
        assert "nyu-mll/glue" in one_line(error)
        root = write_glue(tmp_path, "sst2")
        (root / "glue" / "sst2" / "validation.jsonl").unlink()
        with pytest.raises(DataError, match=r"validation\.jsonl does not exist"):
            read_glue("sst2", root)

    def test_an_unlabelled_file(self, tmp_path: Path) -> None:
        """GLUE's test.jsonl taken for its validation.jsonl: every label is -1."""
        root = write_glue(tmp_path, "sst2")
        rows = [row | {"label": -1} for row in glue_rows("sst2", 3)]
        (root / "glue" / "sst2" / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        with pytest.raises(DataError, match=r"row 1, line 1: label -1 .*'sst2'.* -1"):
            read_glue("sst2", root)

    def test_from_the_hub(self, hub: Hub) -> None:
        """The splits that nyu-mll/glue has: one validation set, two for mnli, matched first."""
        two: dict[Any, list[str]] = {"mnli": ["validation_matched", "validation_mismatched"]}
        for task in SCHEMA:
            tests = two.get(task, ["validation"])
            asked = hub({name: HubRows(glue_rows(task, 4, name)) for name in ("train", *tests)})
            train, found = read_glue(task, None)  # type: ignore[arg-type]
            assert asked == [("nyu-mll/glue", task, name, None) for name in ("train", *tests)]
            assert list(found) == tests
            for name, data in (("train", train), *found.items()):
                assert data.text == tuple(f"{name} first {k}" for k in range(4))
                assert (data.pair is not None) == (task != "sst2")
                assert data.label_names == SCHEMA[task][2]
