"""docs/how-to/extending.md: its rule and its engine are run, and do what the page says. Kind: end-to-end."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fedlora.errors import QuorumNotMet

PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "extending.md"


def played(which: str) -> dict[str, Any]:
    """All blocks of one walk-through, one after the other, as a reader types them."""
    blocks = re.findall(rf"```python {which}\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec", dont_inherit=True), names)
    return names


def test_the_rule_leaves_out_who_shouts_in_any_coordinates(capsys: pytest.CaptureFixture[str]) -> None:
    """Five changes, one fifty times the others: it alone is left out, by name; too few clients are refused."""
    names = played("rule")
    out = capsys.readouterr().out
    assert out == "['site-3']\n" and [*names["elsewhere"].left_out] == ["site-3"]
    with pytest.raises(QuorumNotMet, match=r"longest-out \(f = 1\) needs 3 clients, and 2 came"):
        names["server"].aggregate(names["state"], names["uploads"][:2])


def test_the_engine_gives_the_bits_of_the_one_that_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    """Against `simulate`, which is held to dense oracles elsewhere; and three rounds were played, not none."""
    names = played("engine")
    assert capsys.readouterr().out == "True\n"
    assert names["ours"].round == names["theirs"].round == 3
