"""The parts of the reference that are printed from the code, so that they cannot say something else."""

from __future__ import annotations

from pathlib import Path


def write_all(folder: Path) -> None:
    """Every generated part, as `folder/NAME.md`; pages of reference/ include them."""
    from generate import commands, config_keys, method_list, python_names

    folder.mkdir(exist_ok=True)
    parts = {"commands": commands, "config": config_keys, "methods": method_list, "python": python_names}
    for name, part in parts.items():
        page, text = folder / f"{name}.md", part.page()
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")
