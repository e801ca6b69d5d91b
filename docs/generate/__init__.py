"""The parts of the reference that are printed from the code, so that they cannot say something else."""

from __future__ import annotations

from pathlib import Path


def write_all(folder: Path) -> None:
    """Every generated part, as `folder/NAME.md`; pages of reference/ include them."""
    from generate import commands, config_keys, experiment_keys, method_list, method_pages, python_names

    for pages in ("methods", "python"):
        (folder / pages).mkdir(parents=True, exist_ok=True)
    whole = {
        "commands": commands.page, "config": config_keys.page, "methods": method_list.page,
        "python": python_names.table, "experiments": experiment_keys.experiment_page,
        "claims": experiment_keys.claims_page,
    }  # fmt: skip
    parts = {name: part() for name, part in whole.items()}
    parts |= {f"methods/{name}": text for name, text in method_pages.pages().items()}
    parts |= {f"python/{module}": text for module, text in python_names.pages().items()}
    for name, text in parts.items():
        page = folder / f"{name}.md"
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")
