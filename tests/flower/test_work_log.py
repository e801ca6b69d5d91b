"""A site's own log of its work. Kind of evidence: format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedlora.flower.site.work_log import Work, write


def test_what_is_written_is_a_line_of_json_and_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The site's node is the process whose stderr this one has."""
    write(tmp_path, Work("train", 2, 20, 2.0, 0.125))
    write(tmp_path, Work("train", 3, error="no\nmemory"))
    path = tmp_path / "state" / "logs" / "work.jsonl"
    first, second = map(json.loads, path.read_text().splitlines())
    assert (first["did"], first["round"], first["examples"], first["loss"]) == ("train", 2, 20, 0.125)
    assert second["error"] == "no\nmemory" and path.stat().st_mode & 0o777 == 0o600
    assert capfd.readouterr().err.startswith("round 2: trained 20 examples in 2.0 s, loss 0.1250\n")


def test_a_loss_that_is_no_number_is_an_error_and_the_line_stays_json(tmp_path: Path) -> None:
    write(tmp_path, Work("train", 1, 10, 1.5, float("nan")))
    text = (tmp_path / "state" / "logs" / "work.jsonl").read_text()
    found = json.loads(text)
    assert "NaN" not in text and found["loss"] is None and found["error"] == "the loss is nan"


def test_lines_for_a_screen_say_all_that_is_known() -> None:
    assert Work("train", 3, 120, 14.21, 0.412).line() == "round 3: trained 120 examples in 14.2 s, loss 0.4120"
    assert Work("evaluate", 3, 7, 0.21).line() == "round 3: measured 7 examples in 0.2 s"
    assert Work("train", 4, error="ValueError: no").line() == "round 4: train failed after 0.0 s: ValueError: no"
