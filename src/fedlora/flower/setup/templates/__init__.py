"""Files in other languages than Python, as Jinja templates: nginx's, systemd's, and the head of policy.toml."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from fedlora.core.text import quoted
from fedlora.errors import ConfigError


def filled(template: str, **values: Any) -> str:
    """The text of a file in this folder with `values` filled in. What a value contains is not read as a template."""
    return _TEMPLATES.get_template(template).render(values)


def plain(word: object, file: str) -> str:
    """A word that means itself in both languages. file: the one to be written, for the message.

    Raises:
        ConfigError: it has a letter that nginx or systemd reads as something else.
    """
    text = str(word)
    if not text.isprintable() or text != text.strip() or set(text) & set("\"'\\${};"):
        raise ConfigError(
            f"{quoted(text)} cannot be written into {file}: it has a quote, a backslash, one of ${{}}; an unprintable "
            f"character, or a space at an end. Use another folder or name."
        )
    return text


def _escaped(word: object) -> str:
    """A word as the whole value of a systemd setting, where % begins a specifier."""
    return plain(word, "a systemd unit").replace("%", "%%")


def _words(words: Iterable[object]) -> str:
    """Words as a list in a systemd setting, or a command."""
    return " ".join(f'"{word}"' if " " in word else word for word in map(_escaped, words))


_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True, keep_trailing_newline=True,
    undefined=StrictUndefined, autoescape=False,
)  # fmt: skip
_TEMPLATES.filters.update({"escaped": _escaped, "words": _words})

__all__ = ["filled", "plain"]
