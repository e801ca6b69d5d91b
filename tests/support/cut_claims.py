"""The repository's claims with the families and gates of some experiments alone, for a folder that has no others."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).parents[2]


def cut_claims(folder: Path, experiments: Collection[str]) -> Path:
    """FOLDER/claims.toml."""
    text = (ROOT / "docs" / "claims.toml").read_text(encoding="utf-8")
    kept = [part for part in re.split(r"^(?=\[)", text, flags=re.MULTILINE) if _asks(part) in {None, *experiments}]
    path = folder / "claims.toml"
    path.write_text("".join(kept), encoding="utf-8")
    return path


def _asks(part: str) -> str | None:
    """The experiment of a family or a gate; None for any other table."""
    gate = re.match(r"\[gates\.(\w+)\]", part)
    if gate is not None:
        return gate[1]
    return re.findall(r'^experiment = "(\w+)"', part, flags=re.MULTILINE)[0] if part.startswith("[families.") else None
