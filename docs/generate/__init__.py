"""The parts of the reference that the program prints itself, written into the committed pages between two marks:

    <!-- generated: commands -->
    ...
    <!-- end of commands -->

`python docs/generate` writes them anew, and a test compares them with the program.
"""

from __future__ import annotations

import re
from pathlib import Path

REFERENCE = Path(__file__).parent.parent / "reference"


def parts() -> dict[str, str]:
    """Name of a mark -> what stands there."""
    from generate import commands, config_keys, error_list, experiment_keys, method_list, python_names

    return {
        "commands": commands.page(), "config": config_keys.page(), "python": python_names.page(),
        "experiments": experiment_keys.experiment_page(),
        "errors": error_list.page(),
        **method_list.entries(),
    }  # fmt: skip


def pages() -> dict[Path, str]:
    """Each page of reference/ that has marks -> its text as the program is now.

    Raises:
        KeyError: a mark that nothing is printed for.
    """
    known, found = parts(), {}
    for path in sorted(REFERENCE.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        new = re.sub(
            r"(<!-- generated: (\S+) -->\n).*?(<!-- end of \2 -->)",
            lambda mark: f"{mark[1]}{known[mark[2]].strip()}\n{mark[3]}", text, flags=re.S,
        )  # fmt: skip
        if "<!-- generated:" in text:
            found[path] = new
    return found


def write_python(folder: Path) -> None:
    """For the site alone: a page of each module with the signatures and docstrings of its names."""
    from generate import python_names

    folder.mkdir(exist_ok=True)
    for module, text in python_names.site_pages().items():
        page = folder / f"{module}.md"
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")
