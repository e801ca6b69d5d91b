"""A run folder that somebody or something damaged is refused with what is wrong. Kind: contract."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedlora.errors import CheckpointError
from fedlora.runs.folder import RunFolder

LINES = [json.dumps({"round": k, "metrics": {}}) for k in (1, 2, 3)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("\n".join([LINES[0], '{"round"', LINES[2], ""]), "line 2 .*round 2"),
        ("\n".join([*LINES, "", ""]), "line 4 .*round 4"),
        ("\n".join([LINES[0], "{}", ""]), "line 2 .*round 2"),
        ("\n".join([LINES[0], "[1]", ""]), "line 2 .*round 2"),
        ("\n".join([LINES[0], "\udcff", ""]), "line 2 .*round 2"),
        ("\n".join([LINES[0], LINES[2], ""]), "belongs to round 3"),
        ("\n".join([LINES[0], LINES[0], ""]), "belongs to round 1"),
    ],
)
def test_a_log_with_a_damaged_missing_or_double_line_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=says):
        RunFolder(tmp_path).metrics()


def test_a_half_written_last_line_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("\n".join([*LINES[:2], LINES[2][:5]]))
    assert [line["round"] for line in RunFolder(tmp_path).metrics()] == [1, 2]
    (tmp_path / "metrics.jsonl").write_text("")
    assert RunFolder(tmp_path).metrics() == []


@pytest.mark.parametrize("name", ["summary.json", "manifest.json"])
@pytest.mark.parametrize("text", ["{}", "[]", "3", "", '{"a"'])
def test_a_damaged_file_is_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=name):
        RunFolder(tmp_path).read_json(name)
