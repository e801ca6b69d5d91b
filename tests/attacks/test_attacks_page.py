"""docs/how-to/attacks.md runs as it stands and prints what it says. Kind: end-to-end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.worked_examples import run_page

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "attacks.md"


def test_the_page_runs_and_prints_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_page(PAGE, tmp_path)
    printed = capsys.readouterr().out.strip().splitlines()
    text = PAGE.read_text(encoding="utf-8")
    shown = re.findall(r"It prints:\n\n```\n(.*?)\n```", text, flags=re.DOTALL)
    assert printed[:3] == shown[0].splitlines()
    assert printed[3] == "swapped ['site-0', 'site-1']"
