"""docs/explanation/scale.md: its code runs and prints what it says. Kind: end-to-end."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.worked_examples import run_page

PAGE = Path(__file__).parent.parent / "docs" / "explanation" / "scale.md"


def test_the_summed_round_of_the_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_page(PAGE, tmp_path)
    sums, total = capsys.readouterr().out.split()
    said = PAGE.read_text()
    assert f"# {sums} bytes of sums" in said and f"# {total}\n" in said
