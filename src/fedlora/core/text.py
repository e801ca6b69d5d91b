"""Strangers' text made safe for people and programs to read: bounded, on one line, unable to affect what displays it.

A name or field in a stranger's file may hold terminal control sequences, marks that reverse the reading direction, line
breaks, a megabyte of letters, or the syntax of the page that shows it.
"""

from __future__ import annotations

import json
import re
import reprlib
from typing import Any

from fedlora.errors import escaped

__all__ = ["MOST", "escaped", "markdown_cell", "quoted", "shown", "yaml_string"]

MOST = 200  # letters: enough to recognise something
_YAML_WORDS = ("null", "true", "false", "yes", "no", "on", "off", "y", "n")


def shown(text: object, most: int = MOST) -> str:
    """A stranger's text for one of our lines: escaped and cut to `most` letters."""
    return _cut(escaped(str(text)[: most + 1]), most)


def quoted(value: Any, most: int = MOST) -> str:
    """A stranger's value as Python would write it, cut to `most` letters, however large or deep it is.

    Example:
        >>> quoted({"r": "8\\n" * 1000}, most=20)
        "{'r': '8\\\\n8\\\\n8\\\\n8..."
    """
    return _cut(escaped(_Short(most).repr(value)), most)


def markdown_cell(text: object, most: int = MOST) -> str:
    """A stranger's text as code for a model card's table: it cannot start markup, a link or a column.

    Example:
        >>> markdown_cell("q_proj|[a](http://b)")
        '`q_proj\\\\x7c[a](http://b)`'
    """
    inside = shown(text, most).replace("`", r"\x60").replace("|", r"\x7c")
    return f"`{inside or ' '}`"


def yaml_string(text: object, most: int = 2_000) -> str:
    """A stranger's text as a YAML value on one line: bare if it is plainly a name, otherwise as JSON, which YAML reads.

    Example:
        >>> yaml_string("org/model-7B"), yaml_string("a: b")
        ('org/model-7B', '"a: b"')
    """
    found = escaped(str(text)[:most])
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9_./-]*", found) and found.lower() not in _YAML_WORDS:
        return found
    return json.dumps(found, ensure_ascii=False)  # YAML reads JSON's \ud83d\ude00 as two half letters


class _Short(reprlib.Repr):
    """`repr` of four levels, a dozen items each, with long strings cut."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = 12
        self.maxstring = self.maxother = self.maxlong = most

    def repr_str(self, x: str, level: int) -> str:
        return repr(x[: self.maxstring + 1])  # the beginning says what it is

    def repr_int(self, x: int, level: int) -> str:
        return "a number of very many digits" if x.bit_length() > 10_000 else super().repr_int(x, level)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
