"""Is the base model that an adapter names the one at hand? By its name, or by its weights, wherever they lie."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from fedlora.adapters.base_names import Base, is_same_base
from fedlora.errors import ConfigError
from fedlora.training.content import base_digest, model_content


def is_this_base(
    theirs: Base,
    ours: Iterable[Base],
    here: Path | None,
    *,
    start: Path = Path(),
    weights: Mapping[str, str] | None = None,
) -> bool:
    """Whether an adapter's base is this model.

    Args:
        theirs: as the adapter names it. ours: the model's names and places. here: its folder or file, if it is on this
            machine. start: where a relative path of theirs starts. weights: file -> SHA-256 of theirs, as the adapter's
            own facts tell them.
    """
    if any(is_same_base(theirs, mine) or theirs.name == mine.name for mine in ours):
        return True
    if here is None or not here.exists():
        return False
    content = model_content(here) if weights else {}
    if weights and all(content.get(name) == digest for name, digest in weights.items()):
        return True
    there = start / (theirs.name or "")
    try:
        return bool(theirs.name) and there.exists() and base_digest(there) == base_digest(here)
    except ConfigError:  # it has no weights
        return False


__all__ = ["is_this_base"]
