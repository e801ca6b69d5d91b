"""The parts of the reference that are printed from the code, so that they cannot say something else."""

from __future__ import annotations

from pathlib import Path


def write_all(folder: Path) -> None:
    """Every generated part, as `folder/NAME.md`; pages of reference/ include them."""
    from generate import commands, config_keys, experiment_keys, method_list, python_names

    folder.mkdir(exist_ok=True)
    parts = {
        "commands": commands.page, "config": config_keys.page, "methods": method_list.page, "python": python_names.page,
        "experiments": experiment_keys.experiment_page, "claims": experiment_keys.claims_page,
    }  # fmt: skip
    for name, part in parts.items():
        page, text = folder / f"{name}.md", part()
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")
