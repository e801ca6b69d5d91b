"""TOML files in, values out: what is wrong with a file is said a line each, by the key as the file has it."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from fedlora.errors import ConfigError
from fedlora.runs.sections import RankEntry, Section

Kind = TypeVar("Kind", bound=Section)


def read_tables(path: Path, what: str = "config") -> dict[str, Any]:
    """A TOML file as nested tables. `what` it is, for errors.

    Raises:
        ConfigError: no such file, or no TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"the {what} {path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"the {what} {path} is not TOML: {error}.") from error


def checked(kind: type[Kind], raw: Mapping[str, Any]) -> Kind:
    """Nested tables as a value of that kind. Raises `ConfigError` with a line for each thing wrong."""
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        lines: dict[str, str] = {}
        for e in sorted(
            error.errors(), key=lambda e: e["type"] in ("string_type", "int_type")
        ):  # of alternatives, the plain ones come last
            key = _key(kind, e["loc"])
            lines.setdefault(key, _line(kind, key, e["loc"], e["type"], e["msg"], e.get("input")))
        raise ConfigError("; ".join(lines.values())) from error


def _key(kind: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """The key as the file has it: pydantic goes on to name the alternatives of a type, which are no keys."""
    parts: list[str] = []
    model: Any = kind
    for part in location:
        known = getattr(model, "model_fields", None)
        if known is None and not isinstance(part, int):
            break
        parts.append(str(part))
        model = _table(known[part].annotation) if known and part in known else None
    return ".".join(parts)


def _line(
    model: type[BaseModel], key: str, location: tuple[int | str, ...], kind: str, message: str, value: object
) -> str:
    if kind == "extra_forbidden":
        known = _known_keys(model, location[:-1])
        close = difflib.get_close_matches(str(location[-1]), known, n=1)
        return f"unknown key {key!r}; " + (f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}")
    if kind == "missing":
        return f"key {key!r} is missing"
    if kind == "value_error":  # of our own words
        message = message.removeprefix("Value error, ")
        return message if isinstance(value, dict) else f"{key}: {message}; got {value!r}"
    return f"{key}: {message[0].lower()}{message[1:]}; got {value!r}" if key else message


def _table(annotation: Any) -> Any:
    """The section that a key is of, also where the whole table may be left out."""
    return next((kind for kind in get_args(annotation) if hasattr(kind, "model_fields")), annotation)


def _known_keys(kind: type[BaseModel], section: tuple[int | str, ...]) -> list[str]:
    model: Any = kind
    for part in section:
        known = getattr(model, "model_fields", {})
        if part in known:
            model = _table(known[part].annotation)
        elif part == RankEntry.__name__:  # an alternative of an entry of clients.ranks
            model = RankEntry
    return list(getattr(model, "model_fields", ()))
