"""What holds for every tutorial before its cells are run, which the build of the site does. Kind: *static*."""

from __future__ import annotations

import ast
import codeop
import re
import subprocess
from pathlib import Path

import pytest

from support.tutorials import FOLDER, PAGES, cells

TOUR = FOLDER.parent / "start" / "tour.md"
README = FOLDER.parent.parent / "README.md"
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@pages
def test_the_cells_can_be_read(page: Path) -> None:
    """Every fence of a cell was understood; Python and commands of the shell parse."""
    text = page.read_text(encoding="utf-8")
    found = cells(text)
    assert len(found) == text.count("```{code-cell}") > 3
    for cell in found:
        assert cell.magic in ("", "bash", "writefile")
        if not cell.magic:
            ast.parse(cell.code)
        elif cell.magic == "bash":
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


def stuck(code: str) -> str | None:
    """The line at which Python's prompt, which is given lines one by one, says SyntaxError; None where it does not.

    A statement with an indented block ends at an empty line there, and nowhere else.
    """
    held: list[str] = []
    for line in [*code.split("\n"), ""]:
        held.append(line)
        try:
            if codeop.compile_command("\n".join(held), symbol="single") is not None:
                held = []
        except SyntaxError:
            return line
    return "the end" if any(held) else None


@pytest.mark.parametrize("page", [*PAGES, TOUR], ids=lambda page: page.stem)
def test_a_cell_can_be_typed_at_python_s_prompt_and_hides_no_error(page: Path) -> None:
    """docs/start/install.md says that it can."""
    for cell in cells(page.read_text(encoding="utf-8")):
        assert cell.magic or stuck(cell.code) is None
        assert "/dev/null" not in cell.code


def test_the_readme_s_python_can_be_typed_too() -> None:
    """It is the first that anybody types, and it is no file."""
    for block in re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL):
        assert stuck(block) is None


def test_what_python_s_prompt_refuses_is_found() -> None:
    """As CPython 3.11 does: a block that no empty line ends, and one that an empty line ends too soon."""
    assert stuck("if x:\n    y = 1\n\nprint(y)") is None
    assert stuck("if x:\n    y = 1\nprint(y)") == "print(y)"
    assert stuck("def f():\n    y = 1\n\n    return y\n") == "    return y"
