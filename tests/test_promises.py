"""docs/reference/adapters-from-strangers.md: each promise has a test, each named test is there. Kind: structural."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference" / "adapters-from-strangers.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@cache
def defined_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def promises() -> list[str]:
    """The bullets of the numbered sections."""
    sections = re.findall(r"^## \d\. .*?(?=^## )", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert len(sections) == 4
    return [
        " ".join(b.split())
        for part in sections
        for b in re.findall(r"^\* (.*?)(?=^\* |^\s*$|^<|\Z)", part, re.M | re.S)
    ]


def test_every_promise_names_its_test() -> None:
    lacking = [line for line in promises() if not NAMED.search(line)]
    assert not lacking, lacking
    assert len(promises()) >= 10


def test_every_named_test_is_there() -> None:
    named = NAMED.findall(PAGE.read_text(encoding="utf-8"))
    assert named
    missing = [f"{path}::{name}" for path, name in named if not (ROOT / path).exists() or name not in defined_in(path)]
    assert not missing, missing


def test_the_page_on_adapters_leads_there() -> None:
    section = (
        (ROOT / "docs" / "how-to" / "adapters.md")
        .read_text(encoding="utf-8")
        .partition("## Adapters from strangers")[2]
    )
    assert "adapters-from-strangers.md" in section.partition("\n## ")[0]
