"""Docstrings are plain prose: before Sphinx reads them as reStructuredText its marks are made letters again."""

from __future__ import annotations

import re
from typing import Any


def as_rst(app: Any, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """A listener of autodoc-process-docstring: changes `lines` in place."""
    example = False
    for k, text in enumerate(lines):
        if re.match(r"\S", text):
            example = False
        if re.match(r"\s*Examples?::?$", text) or text.lstrip().startswith((">>>", "...")):
            example = True
        if not example:
            lines[k] = _letters(text)


def _letters(text: str) -> str:
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(piece if piece.startswith("`") else _escaped(piece) for piece in pieces)


def _escaped(text: str) -> str:
    bullet = re.match(r"\s*\* ", text)
    head, rest = (text[: bullet.end()], text[bullet.end() :]) if bullet else ("", text)
    return head + re.sub(r"([*|])|(?<=\w)(_)(?!\w)", lambda mark: "\\" + mark[0], rest)


def short_signature(
    app: Any, what: str, name: str, obj: object, options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None] | None:
    """A listener of autodoc-process-signature: a dataclass's default that is made anew each time, in Python's letters.

    Sphinx cannot parse "<factory>", and would show the whole signature as raw text.
    """
    if signature is None or "<factory>" not in signature:
        return None
    return signature.replace("<factory>", "..."), returns
