"""GLUE from its own files.

Kinds of evidence: *oracle* (small files written here in the schema of the real ones, and what must come out of them,
by hand), *contract* (bad input is one line).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedlora.data import GLUE, TextData, read_glue
from fedlora.errors import DataError
from support.benchmark_files import SCHEMA, glue_rows, write_glue


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

    def test_an_unlabelled_file(self, tmp_path: Path) -> None:
        """GLUE's test.jsonl taken for its validation.jsonl: every label is -1."""
        root = write_glue(tmp_path, "sst2")
        rows = [row | {"label": -1} for row in glue_rows("sst2", 3)]
        (root / "glue" / "sst2" / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        with pytest.raises(DataError, match=r"row 1, line 1: label -1 .*'sst2'.* -1"):
            read_glue("sst2", root)
