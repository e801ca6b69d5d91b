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


def linked(text: str) -> str:
    """Pages of the site that the words name by their file, as links from a page of reference/."""
    return re.sub(r"\bdocs/(explanation|how-to|tutorials)/([a-z-]+)\.md", _link, text)


def _link(found: re.Match[str]) -> str:
    return f"[{found[2].replace('-', ' ')}](../{found[1]}/{found[2]}.md)"


def entry(name: str, facts: Iterable[str], meaning: str) -> str:
    """One entry of a definition list: a name, what it may be, and what it means."""
    said = ", ".join(fact for fact in facts if fact)
    return f"`{name}`{' · ' + said if said else ''}\n: {meaning}\n"
