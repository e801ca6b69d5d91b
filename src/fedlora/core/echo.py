"""Untrusted text made safe for people and programs to read: bounded, on one line, unable to affect what displays it.

A name or field in a stranger's file may hold terminal control sequences, marks that reverse the reading direction, line
breaks, a megabyte of letters, or the syntax of the page that shows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from fedlora.errors import escaped

__all__ = ["MOST", "escaped", "markdown_cell", "quoted", "shown", "yaml_string"]

MOST = 200  # letters: enough to recognise something
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./ ")
_DEEPEST = 4


def shown(text: object, most: int = MOST) -> str:
    """A stranger's text for one of our lines: escaped and cut to `most` letters."""
    return _cut(escaped(_head(str(text), most)), most)


def quoted(value: Any, most: int = MOST) -> str:
    """A stranger's value as Python would write it, cut to `most` letters, however large or deep it is.

    Example:
        >>> quoted({"r": "8\\n" * 1000}, most=20)
        "{'r': '8\\\\n8\\\\n8\\\\n8..."
    """
    return _cut(_written(value, most, 0), most)


def markdown_cell(text: object, most: int = MOST) -> str:
    """A stranger's text as code for a model card's table: it cannot start markup, a link or a column.

    Example:
        >>> markdown_cell("q_proj|[a](http://b)")
        '`q_proj\\\\x7c[a](http://b)`'
    """
    return f"`{shown(text, most).replace('`', _code_of('`')).replace('|', _code_of('|')) or ' '}`"


def yaml_string(text: object, most: int = 2_000) -> str:
    """A stranger's text as a YAML value on one line: bare if it is plainly a name, otherwise quoted.

    Example:
        >>> yaml_string("org/model-7B"), yaml_string("a: b")
        ('org/model-7B', '"a: b"')
    """
    found = str(text)[:most]
    plain = found and found[0].isalpha() and set(found) <= _PLAIN and not found.endswith(" ")
    words = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}
    return found if plain and found.lower() not in words else f'"{"".join(map(_yaml, found))}"'


def _yaml(letter: str) -> str:
    """A letter between YAML's double quotes; a lone surrogate becomes "?"."""
    if "\ud800" <= letter <= "\udfff":
        return "?"
    return letter if letter.isprintable() and letter not in '"\\' else f"\\U{ord(letter):08x}"


def _code_of(letter: str) -> str:
    return f"\\x{ord(letter):02x}"


def _head(text: str, most: int) -> str:
    return text[: most + 1]


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _written(value: Any, most: int, depth: int) -> str:
    """`repr` of only as much of the value as `most` letters can show."""
    if isinstance(value, str):
        return repr(_head(value, most))
    if isinstance(value, bytes):
        return repr(value[: most + 1])
    if isinstance(value, int) and value.bit_length() > 4 * most:
        return "a number of very many digits"
    if isinstance(value, Mapping | Sequence) and depth >= _DEEPEST:
        return "..."
    if isinstance(value, Mapping):
        pairs = (f"{_written(k, most, depth + 1)}: {_written(v, most, depth + 1)}" for k, v in value.items())
        return f"{{{_listed(pairs, most)}}}"
    if isinstance(value, Sequence):
        left, right = "()" if isinstance(value, tuple) else "[]"
        only = "," if isinstance(value, tuple) and len(value) == 1 else ""
        return f"{left}{_listed((_written(v, most, depth + 1) for v in value), most)}{only}{right}"
    return escaped(_head(repr(value), most))


def _listed(parts: Iterable[str], most: int) -> str:
    """The parts joined by commas, only as many as `most` letters can show."""
    taken, length = [], 0
    for part in islice(parts, most):
        taken.append(part)
        length += len(part) + 2
        if length > most:
            taken.append("...")
            break
    return ", ".join(taken)
