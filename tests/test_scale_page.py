"""docs/explanation/scale.md: its code runs and prints what it says. Kind: end-to-end."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.worked_examples import run_page

PAGE = Path(__file__).parent.parent / "docs" / "explanation" / "scale.md"


def test_the_sketched_round_of_the_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_page(PAGE, tmp_path)
    assert capsys.readouterr().out.strip() == "two-pass sketch"
    assert found["intake"].exchanges == 2, "up, down and up again, as the page says"
