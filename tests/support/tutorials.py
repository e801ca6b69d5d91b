"""The tutorials' pages and their cells.

```{code-cell} ipython3        Python; or a cell magic: %%bash, %%writefile NAME
:tags: [remove-cell]           an option; such a cell is run and not shown
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent.parent.parent / "docs" / "tutorials"
PAGES = sorted(FOLDER.glob("*.md"))
_CELL = re.compile(r"^```\{code-cell\} ipython3\n((?::[^\n]*\n)*)\n?(.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Cell:
    """magic: "bash", "writefile", or "" for Python; code: without the magic's line."""

    code: str
    magic: str = ""
    hidden: bool = False


def cells(page: str) -> list[Cell]:
    """The code cells of a page in their order."""
    found = []
    for options, text in _CELL.findall(page):
        magic = re.match(r"%%(\w+)[^\n]*\n", text)
        code = text[magic.end() :] if magic else text
        found.append(Cell(code, magic[1] if magic else "", "remove-cell" in options))
    return found
