"""docs/explanation/scale.md: its code runs and prints what it says. Kind: end-to-end."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.worked_examples import run_page

PAGE = Path(__file__).parent.parent / "docs" / "explanation" / "scale.md"


def test_the_streamed_round_of_the_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_page(PAGE, tmp_path)
    assert (
        f"# {capsys.readouterr().out.strip()}\n" in PAGE.read_text()
        and f"{8 * 64 * 48:,} bytes of sums" in PAGE.read_text()
    )
