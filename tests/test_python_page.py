"""Pages that run as they stand, block after block. Kind: end-to-end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.projects import make_project
from support.worked_examples import python_blocks, run_page

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "how-to" / "python.md"


@pytest.mark.exhaustive
def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """docs/how-to/python.md in a user's project. Three rounds that lower the loss, two more after a checkpoint, an
    adapter that comes back."""
    monkeypatch.chdir(make_project(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    found = run_page(PAGE, tmp_path)
    printed = capsys.readouterr().out
    assert (tmp_path / "runs" / "first" / "summary.json").is_file()
    losses = [float(x) for x in re.findall(r"'loss': ([\d.]+)}", printed)]
    assert losses and all(0 < x < 10 for x in losses)
    assert found["record"].round == 4
    assert losses[-1] < 1.2  # three classes at random: ln 3 = 1.1; it starts above
    assert found["adapter"].ranks.keys() == found["seed_adapter"].ranks.keys()


def test_a_run_is_ten_lines() -> None:
    first = python_blocks(PAGE)[0]
    assert len([line for line in first.splitlines() if line.strip()]) <= 10


def test_the_streamed_round_of_the_page_on_scale_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And prints what the page says that it prints."""
    page = DOCS / "explanation" / "scale.md"
    run_page(page, tmp_path)
    text = page.read_text(encoding="utf-8")
    assert f"# {capsys.readouterr().out.strip()}\n" in text and f"{8 * 64 * 48:,} bytes of sums" in text
