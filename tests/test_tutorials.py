"""What holds for every tutorial before its cells are run, which the build of the site does. Kind: *static*."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from support.tutorials import PAGES, Cell, as_script, cells

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@pages
def test_the_cells_can_be_read(page: Path) -> None:
    """Every fence of a cell was understood; Python and commands of the shell parse."""
    text = page.read_text(encoding="utf-8")
    found = cells(text)
    assert len(found) == text.count("```{code-cell}") > 3
    ast.parse(as_script(text))
    for cell in found:
        assert cell.magic in ("", "bash", "writefile")
        if cell.magic == "bash":
            done = subprocess.run(["bash", "-n", "-c", cell.code], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr


@pages
def test_a_command_that_fails_fails_the_build(page: Path) -> None:
    """`!command` in a cell goes on after a failure; %%bash does not."""
    for cell in cells(page.read_text(encoding="utf-8")):
        assert not re.search(r"^\s*[!%]", cell.code, re.M), cell.code


@pages
def test_a_page_works_in_a_folder_of_its_own(page: Path) -> None:
    first = cells(page.read_text(encoding="utf-8"))[0]
    assert first.hidden and first.code.startswith("import _page")


def test_a_script_does_what_the_cells_do() -> None:
    """Written by hand from the three kinds of cells."""
    page = (
        "```{code-cell} ipython3\n:tags: [remove-cell]\n\nimport os\n```\n"
        "```{code-cell} ipython3\n%%writefile a.toml\nx = 1\n```\n"
        "```{code-cell} ipython3\n%%bash\nls\n```\n"
        "```{code-cell} ipython3\nprint(1)\n```\n"
    )
    assert cells(page) == [
        Cell("import os\n", hidden=True),
        Cell("x = 1\n", "writefile", "a.toml"),
        Cell("ls\n", "bash"),
        Cell("print(1)\n"),
    ]
    script = as_script(page)
    assert script.endswith("Path('a.toml').write_text('x = 1\\n')\n\nbash('ls\\n')\n\nprint(1)\n")
    assert "import os" not in script
