"""docs/how-to/robust-rules.md: its code runs, its tables name all rules and methods. Kind: end-to-end, structural."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fedlora import METHODS, Server
from fedlora.errors import HyperparameterError
from fedlora.given_files import read_toml
from fedlora.methods import build
from fedlora.runs.config import parse_config
from fedlora.runs.robust import _RULES
from fedlora.server.kept import Kept
from fedlora.server.rules import Krum

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "robust-rules.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """One of six pulls the other way: it is left out, and nobody else."""
    torch.manual_seed(0)
    exec(compile(re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)[0], "robust-rules.md", "exec"), {})
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "multi-krum left out site-4 (1 of 6 clients)" and said[0] in TEXT
    assert [line for line in said[1:] if " away from " in line] == [said[5]]
    assert said[5].startswith("site-4 0.167 -> 0.000") and said[1].startswith("site-0 0.167 -> 0.200")


def test_the_table_of_keys_is_read_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "page.toml").write_text(re.findall(r"```toml\n(.*?)```", TEXT, flags=re.DOTALL)[0])
    config = parse_config(
        {"model": {"name": "m"}, "data": {"train": "t.csv"}, **read_toml(tmp_path / "page.toml", "the page")}
    )
    assert str(config.robust.build()) == "multi-krum (f = 0.2) after mixing"


def test_every_rule_has_a_row_and_a_bound() -> None:
    for head, last in (("| rule | use it if |", "nnm = true"), ("| rule | bound |", "nnm")):
        table = TEXT.partition(head)[2].partition("\n\n")[0]
        assert {*re.findall(r"^\| `(.*?)`", table, flags=re.M)} == {*_RULES, last}


def test_every_method_is_where_it_belongs() -> None:
    rows = {row[0]: row[1] for row in re.findall(r"^\| ((?:glora|ffa|fedit).*) \| (exact|refused)", TEXT, flags=re.M)}
    said = {name: {rows[row] for row in rows if re.search(rf"(^|[ ,]){name}([ ,]|$)", row)} for name in METHODS}
    for name in METHODS:
        try:
            Server(build(name), round=Kept(rule=Krum(1)))
            assert "exact" in said[name], name
        except HyperparameterError:
            assert said[name] == {"refused"}, name
    with pytest.raises(HyperparameterError, match="svd with that rank"):
        Server(build("glora", rho=0.5), round=Kept(rule=Krum(1)))
