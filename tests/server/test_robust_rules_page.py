"""docs/how-to/robust-rules.md: its code runs, its tables name all rules and methods. Kind: end-to-end, structural."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fedlora import METHODS
from fedlora.core.multiplied import multiplied_how
from fedlora.given_files import read_toml
from fedlora.methods import build
from fedlora.runs.config import parse_config
from fedlora.runs.defence import _RULES

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "robust-rules.md"
TEXT = PAGE.read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


def test_the_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """One of six pulls the other way: it is left out, and nobody else."""
    torch.manual_seed(0)
    names: dict[str, object] = {}
    for block in blocks("python"):
        exec(compile(block, "robust-rules.md", "exec"), names)
    said = capsys.readouterr().out
    assert said.startswith("['site-4'] True\nthe distance to")
    assert "multi-krum leaves out site-4 (1 of 6)" in said and "'site-4': 0.0" in said


def test_the_table_of_keys_is_read_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "page.toml").write_text(blocks("toml")[0])
    config = parse_config(
        {"model": {"path": "m"}, "data": {"train": "t.csv"}, **read_toml(tmp_path / "page.toml", "the page")}
    )
    rule = config.defence.build()
    assert rule is not None and rule.said == "mixing (liars = 0.2), then multi-krum (liars = 0.2)"


def test_every_rule_has_a_row() -> None:
    assert {*re.findall(r"^\| `([a-z-]+)` \|", TEXT, flags=re.M)} == set(_RULES)


def test_every_method_is_in_the_row_of_what_it_gets() -> None:
    rows = {
        "products": r"^\| (.*) \| each update",
        "terms": r"^\| (.*) \| two updates",
        "factors": r"^\| (.*) \| (?:the one factor|both factors|A changed)",
    }
    said = {how: {n.strip() for row in re.findall(rows[how], TEXT, flags=re.M) for n in row.split(",")} for how in rows}
    for name in METHODS:
        assert [how for how in said if name in said[how]] == [multiplied_how(build(name))], name
