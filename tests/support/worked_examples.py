"""Code of the documentation, run as it stands in a user's project."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def run_page(page: Path, folder: Path) -> dict[str, Any]:
    """All blocks of a page in order, in one namespace: what it holds in the end. A block that begins with the name of
    a file ("NAME.py: ..." as its docstring) becomes that file in `folder`, the directory where it runs."""
    found: dict[str, Any] = {}
    for block in python_blocks(page):
        named = re.match(r'"""(\w+\.py)', block)
        if named:
            (folder / named[1]).write_text(block)
        else:
            exec(compile(block, page.name, "exec"), found)
    return found
