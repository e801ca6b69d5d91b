"""Records in the weights' headers which command wrote a folder, so that `--force` replaces nothing else.

File names cannot tell: peft's save_pretrained leaves the same ones. The mark is in a safetensors file's metadata, which
every reader accepts. It survives copying, and disappears once peft has trained the adapter further and saved it in
place.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedlora.adapters.limits import Limits
from fedlora.adapters.untrusted_files import StrangersFile, raw_header
from fedlora.core.text import quoted
from fedlora.errors import AdapterFormatError

_KEY = "written_by"


def marked(by: str) -> dict[str, str]:
    """A safetensors file's metadata. by: such as "fedlora merge"; "" if no command may replace the file."""
    return {"format": "pt", _KEY: by} if by else {"format": "pt"}


def written_by(weights: Path) -> str:
    """The mark in a safetensors file; "" if it has none, or is not such a file."""
    try:
        header, _ = raw_header(StrangersFile(weights), Limits())
    except AdapterFormatError:
        return ""
    notes = header.get("__metadata__")
    found = notes.get(_KEY) if isinstance(notes, dict) else None
    return found if isinstance(found, str) else ""


def only_by(by: str, weights: str) -> Callable[[Path], str | None]:
    """For a `FolderKind`: why `by` did not write a folder, in words. weights: a glob of the marked files."""

    def stranger(folder: Path) -> str | None:
        found = sorted(folder.glob(weights))
        for path in found:
            other = written_by(path)
            if other != by:
                whose = f"{quoted(other, 80)} wrote that" if other else "their metadata name no program"
                return f"holds weights that `{by}` did not write ({quoted(str(path.relative_to(folder)))}: {whose})"
        return None if found else f"holds no weights, so `{by}` did not write it"

    return stranger
