"""What is typed: methods ("glora", "glora gamma=1", or several separated by commas), a robust rule, seeds, labels.

Commas and spaces inside quotes or brackets belong to a value: "own:Mean label='a, b', own:Mean weights=[1, 2]".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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
_MOST = 10_000  # more is a typing error, and would not fit in memory


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
        values[key] = typed(value)
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


def parse_seeds(text: str, option: str) -> list[int]:
    """Seeds from "0:8" (half-open, as in Python), "0,3,5" or "7". Raises `ConfigError`."""
    found: Sequence[int]
    try:
        if ":" in text:
            first, end = (int(part) for part in text.split(":"))
            found = range(first, end)
        else:
            found = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} takes seeds as 0:8, 0,3,5 or 7; got {text!r}.") from error
    if len(found) > _MOST:
        raise ConfigError(f"{option} {text} names {len(found):,} seeds; at most {_MOST:,} are allowed.")
    if not found or len({*found}) < len(found):
        what = "names no seed" if not found else "names a seed twice"
        raise ConfigError(f"{option} {text} {what}; it takes seeds as 0:8 (0 to 7), 0,3,5 or 7.")
    return list(found)


def parse_only(text: str, axes: Mapping[str, object]) -> dict[str, list[str]]:
    """Axis -> labels from "task=SST-2,method=GLoRA,method=FedIT". A label may have commas. Raises `ConfigError`."""
    found: dict[str, list[str]] = {}
    for part in re.split(rf",(?=\s*(?:{'|'.join(map(re.escape, axes))})\s*=)", text):
        axis, equals, label = (word.strip() for word in part.partition("="))
        if not (axis and equals and label):
            raise ConfigError(f"--filter takes AXIS=LABEL,AXIS=LABEL; got {text!r}. The axes are {', '.join(axes)}.")
        found.setdefault(axis, []).append(label)
    return found
