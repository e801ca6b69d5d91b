"""Methods as typed: "glora", "glora gamma=1", "glora rho=0.5", or several separated by commas.

Commas and spaces inside quotes or brackets belong to a value: "own:Mean label='a, b', own:Mean weights=[1, 2]".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedlora.errors import ConfigError, repeated
from fedlora.methods.registry import METHODS
from fedlora.runs.config import typed
from fedlora.runs.reading import checked
from fedlora.runs.robust import RobustSection
from fedlora.runs.sections import MethodSection
from fedlora.server.rules import Rule

_CLOSED_BY = {'"': '"', "'": "'", "[": "]"}
_SPACES = " \t\r\n"


def parse_methods(text: str) -> dict[str, MethodSection]:
    """Label -> the method's section, in the given order; "all" is every method at its defaults.

    Raises:
        ConfigError: a part is not NAME [KEY=VALUE ...], or a label occurs twice.
    """
    parts = [part.strip() for part in _cut(text, ",") if part.strip()]
    names = [name for part in parts for name in (METHODS if part == "all" else [part])]
    labels = [plain_label(name) for name in names]
    twice = repeated(labels)
    if twice:
        raise ConfigError(f"the method {twice[0]!r} is named twice.")
    sections = {}
    for before, label in zip([None, *labels], labels, strict=False):
        name, *settings = _cut(label, _SPACES)
        if "=" in name:
            behind = f", as {f'{before} {label}'!r}" if before else ""
            raise ConfigError(
                f"{label!r} names no method. A method is NAME [KEY=VALUE ...]: put commas between methods, and "
                f"spaces before a method's own settings{behind}."
            )
        sections[label] = parse_method(name, settings)
    if not sections:
        raise ConfigError("no method is named; see `fedlora methods`, or use all.")
    return sections


def parse_method(name: str, settings: Sequence[str]) -> MethodSection:
    """One method from its name and KEY=VALUE words. Raises `ConfigError`."""
    text = " ".join([name, *settings])
    values = _values(settings, f"a method is NAME [KEY=VALUE ...], such as 'glora gamma=1'; got {text!r}.", "name")
    try:
        return checked(MethodSection, {"name": name, **values})
    except ConfigError as error:
        raise ConfigError(f"the method {text!r} cannot be read: {_sentence(error)}") from error


def parse_robust(text: str) -> Rule | None:
    """A robust rule as typed: "krum byzantine=1", "geometric-median". Raises `ConfigError`."""
    name, *settings = _cut(" ".join(text.split()), _SPACES)
    values = _values(
        settings, f"a robust rule is NAME [KEY=VALUE ...], such as 'krum byzantine=1'; got {text!r}.", "rule"
    )
    try:
        section = checked(RobustSection, {"rule": name, **values})
    except ConfigError as error:
        raise ConfigError(f"--robust {text!r} cannot be read: {_sentence(error)}") from error
    return section.build()


def _sentence(error: ConfigError) -> str:
    return str(error) if str(error).endswith("?") else f"{error}."


def _values(settings: Sequence[str], wrong: str, taken: str) -> dict[str, Any]:
    """KEY=VALUE words as TOML values; a bare word is a string. Raises `ConfigError` with the text `wrong`."""
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key or key == taken:
            raise ConfigError(wrong)
        values[key] = typed(value, repr(setting))
    return values


def plain_label(text: str) -> str:
    """A method's label: its words with one space between them. Raises `ConfigError` as `parse_methods` does."""
    return " ".join(word for word in _cut(text, _SPACES) if word)


def _cut(text: str, at: str) -> list[str]:
    """The text cut at each of these characters outside quotes and brackets."""
    pieces, closing = [""], ""
    for character in text:
        if not closing and character in at:
            pieces.append("")
            continue
        pieces[-1] += character
        closed = character == closing
        closing = "" if closed else closing or _CLOSED_BY.get(character, "")
    if closing:
        raise ConfigError(f"a closing {closing} is missing after {pieces[-1].strip()!r}.")
    return pieces
