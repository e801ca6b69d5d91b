"""Which command wrote a folder: a word in the headers of its weights, so that `--force` replaces nothing else.

The names of files do not tell: what peft's save_pretrained leaves looks the same. The word stands in the table of texts
that a safetensors file may have, which every reader takes; it goes along with a copy, and it is gone once peft has
trained the adapter on and saved it in the same place.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedlora.adapters.limits import Limits
from fedlora.adapters.untrusted_files import StrangersFile, raw_header
from fedlora.core.echo import quoted
from fedlora.errors import AdapterFormatError

_KEY = "written_by"


def marked(by: str) -> dict[str, str]:
    """The table of texts of a safetensors file. by: such as "fedlora merge"; "" for what no command replaces."""
    return {"format": "pt", _KEY: by} if by else {"format": "pt"}


def written_by(weights: Path) -> str:
    """The mark of a safetensors file; "" where it has none, or is none."""
    try:
        header, _ = raw_header(StrangersFile(weights), Limits())
    except AdapterFormatError:
        return ""
    notes = header.get("__metadata__")
    found = notes.get(_KEY) if isinstance(notes, dict) else None
    return found if isinstance(found, str) else ""


def only_by(by: str, weights: str) -> Callable[[Path], str | None]:
    """For a `FolderKind`: why a folder is not what `by` wrote, in words. weights: a glob of the files that say so."""

    def stranger(folder: Path) -> str | None:
        found = sorted(folder.glob(weights))
        for path in found:
            other = written_by(path)
            if other != by:
                whose = f"{quoted(other, 80)} wrote that" if other else "their metadata name no program"
                return f"holds weights that `{by}` did not write ({quoted(str(path.relative_to(folder)))}: {whose})"
        return None if found else f"holds no weights, so `{by}` did not write it"

    return stranger
