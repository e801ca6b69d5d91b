"""Plain prose from docstrings and help texts as Markdown that says the same."""

from __future__ import annotations

import re
from collections.abc import Iterable


def prose(text: str) -> str:
    """Paragraphs; what is not in backticks means nothing but itself."""
    pieces = re.split(r"(`[^`]*`)", text.strip())
    return "".join(
        piece if piece.startswith("`") else re.sub(r"([\\*_<>\[\]{}|#$~])", r"\\\1", piece) for piece in pieces
    )


def line(text: str) -> str:
    """The same in one line."""
    return " ".join(prose(text).split())


def entry(name: str, facts: Iterable[str], meaning: str) -> str:
    """One entry of a definition list: a name, what it may be, and what it means."""
    said = ", ".join(fact for fact in facts if fact)
    return f"`{name}`{' · ' + said if said else ''}\n: {meaning}\n"
