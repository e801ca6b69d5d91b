"""The tutorials' pages: their cells, and a page as one script that runs without a notebook.

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
    """magic: "bash", "writefile", or "" for Python; word: what stands behind it; code: without the magic's line."""

    code: str
    magic: str = ""
    word: str = ""
    hidden: bool = False


def cells(page: str) -> list[Cell]:
    """The code cells of a page in their order."""
    found = []
    for options, text in _CELL.findall(page):
        magic = re.match(r"%%(\w+) ?([^\n]*)\n", text)
        code = text[magic.end() :] if magic else text
        found.append(Cell(code, magic[1] if magic else "", magic[2] if magic else "", "remove-cell" in options))
    return found


def as_script(page: str) -> str:
    """What the page does, as Python, in the folder where it is started; without the cells that nobody sees."""
    parts = ["import subprocess\nfrom pathlib import Path\n"]
    for cell in cells(page):
        if cell.magic == "bash":
            parts.append(f"subprocess.run(['bash', '-c', {cell.code!r}], check=True)\n")
        elif cell.magic == "writefile":
            parts.append(f"Path({cell.word!r}).write_text({cell.code!r})\n")
        elif not cell.hidden:
            parts.append(cell.code)
    return "\n".join(parts)
