"""Methods as they are typed: "glora", "glora gamma=1", "flexlora preset=raflora", several of them behind commas."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence

from pydantic import ValidationError

from fedlora.errors import ConfigError
from fedlora.methods.registry import METHODS
from fedlora.runs.sections import MethodSection


def parse_methods(text: str) -> dict[str, MethodSection]:
    """Label -> the method's section, in the order given; "all" is every method at its defaults.

    Raises:
        ConfigError: what is no NAME [KEY=VALUE ...], or a label twice.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    names = [name for part in parts for name in (METHODS if part == "all" else [part])]
    labels = [" ".join(name.split()) for name in names]
    twice = [label for label in labels if labels.count(label) > 1]
    if twice:
        raise ConfigError(f"the method {twice[0]!r} is named twice.")
    sections = {label: parse_method(*_split(label)) for label in labels}
    if not sections:
        raise ConfigError("no method is named; see `fedlora methods`, or say all.")
    return sections


def parse_method(name: str, settings: Sequence[str]) -> MethodSection:
    """One method from its name and KEY=VALUE words. Raises `ConfigError`."""
    text, values = " ".join([name, *settings]), {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key or key == "name":
            raise ConfigError(f"a method is NAME [KEY=VALUE ...], as 'glora gamma=1'; got {text!r}.")
        try:
            values[key] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            values[key] = value  # a bare word is a string
    try:
        return MethodSection.model_validate({"name": name, **values})
    except ValidationError as error:
        wrong = "; ".join(f"{e['loc'][0]}: {e['msg']}" for e in error.errors())
        raise ConfigError(f"the method {text!r} cannot be read: {wrong}.") from error


def _split(label: str) -> tuple[str, list[str]]:
    name, *settings = label.split()
    return name, settings
