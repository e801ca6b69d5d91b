"""Turns nested tables into values, reporting one line per mistake under the key's name in the file."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from fedlora.errors import ConfigError
from fedlora.runs.synonyms import SYNONYMS
from fedlora.training.settings import Section

Kind = TypeVar("Kind", bound=Section)


def checked(kind: type[Kind], raw: Mapping[str, Any]) -> Kind:
    """Nested tables as a value of that kind. Raises `ConfigError` with one line per mistake."""
    found, wrong = partly(kind, raw)
    if wrong:
        raise ConfigError("; ".join(wrong))
    assert found is not None  # nothing was wrong
    return found


def partly(kind: type[Kind], given: Mapping[str, Any]) -> tuple[Kind | None, list[str]]:
    """The value without what is wrong in it, and a line for each mistake; None if it cannot be without.

    A table's keys are judged together only when each is right alone, so unknown keys are taken out and it is judged
    again. After a wrong value or a misspelt key was taken out, what the rest of its table lacks is no mistake of the
    file.
    """
    raw: dict[str, Any] = deepcopy(dict(given))
    flat = not any(any(tables_in(field.annotation)) for field in kind.model_fields.values())

    def table(key: str) -> str:
        return "" if flat else key.partition(".")[0]

    lines, torn = dict[str, None](), set[str]()
    while True:
        try:
            return kind.model_validate(raw), list(lines)
        except ValidationError as error:
            by_key: dict[str, list[Any]] = {}
            for one in error.errors():
                by_key.setdefault(_key(one, raw), []).append(one)
            lines_of = {key: _line(kind, key, _of_its_type(wrong)) for key, wrong in by_key.items()}
            unknown = [key for key, wrong in by_key.items() if wrong[0]["type"] == "extra_forbidden"]
            misspelt = {table(key) for key in unknown if "did you mean" in lines_of[key]}
            for key, line in lines_of.items():
                beside = [other for other in unknown if table(other) == table(key)]  # their hints leave out the table
                meant = any(f"did you mean {key!r}?" in lines_of[other] for other in unknown)
                meant |= any(f"did you mean {key.rpartition('.')[2]!r}?" in lines_of[other] for other in beside)
                if not meant and not _meant_deeper(key, by_key) and table(key) not in torn:
                    lines.setdefault(line)
            torn |= misspelt if unknown else {table(key) for key in by_key}
            if not sum(_take_out(raw, key) for key in unknown or by_key):  # all of them
                return None, list(lines)


def _take_out(raw: dict[str, Any], key: str) -> bool:
    """Remove a key, or the list that a wrong entry is in; whether it was there."""
    *path, last = key.split(".")
    table: Any = raw
    for part in path:
        if not isinstance(table.get(part), dict):
            last = part
            break
        table = table[part]
    return table.pop(last, None) is not None


def _key(error: Any, raw: object) -> str:
    """The key of an error in the file. pydantic's own location also includes which of several types it tried."""
    keys: list[str] = []
    for part in error["loc"]:
        if (isinstance(raw, Mapping) and part in raw) or (isinstance(raw, list | tuple) and isinstance(part, int)):
            raw = raw[part]
            keys.append(str(part))
    return ".".join([*keys, str(error["loc"][-1])] if error["type"] == "missing" else keys)


def _misfit(error: Any) -> bool:
    """Whether the value does not have the type at all, which may be one of several."""
    return bool(error["type"].endswith(("_type", "literal_error")))


def _of_its_type(wrong: list[Any]) -> list[Any]:
    """One key's errors for the type that its value has, out of the errors for all types it may have."""
    return [error for error in wrong if not _misfit(error)] or wrong


def _meant_deeper(key: str, by_key: Mapping[str, list[Any]]) -> bool:
    """Whether the value is a list or table, as one of several types requires, and the error lies inside it."""
    return all(map(_misfit, by_key[key])) and any(other.startswith(f"{key}.") for other in by_key)


_WORDS = {  # pydantic's type of an error -> what the value must be
    "int_type": "a whole number", "int_from_float": "a whole number", "float_type": "a number",
    "bool_type": "true or false", "string_type": "a text in quotes", "list_type": "a list", "tuple_type": "a list",
    "dict_type": "a table", "model_type": "a table", "literal_error": "{expected}", "finite_number": "finite",
    "greater_than": "above {gt}", "greater_than_equal": "at least {ge}", "less_than": "below {lt}",
    "less_than_equal": "at most {le}", "string_too_short": "not empty", "too_short": "not empty",
}  # fmt: skip


def _line(kind: type[BaseModel], key: str, wrong: Sequence[Any]) -> str:
    error, name = wrong[0], key.rpartition(".")[2]
    if error["type"] == "extra_forbidden":
        known = _known(kind, error["loc"][:-1])
        ours = SYNONYMS.get(key) or SYNONYMS.get(name)
        if ours is not None and ours.partition(".")[0] not in kind.model_fields:  # of one table alone
            ours = ours.rpartition(".")[2]
        close = [ours] if ours is not None else difflib.get_close_matches(name, known, n=1)
        return f"unknown key {key!r}; " + (f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}")
    if error["type"] == "missing":
        return f"key {key!r} is missing"
    if error["type"] == "value_error":  # in our own words
        message = error["msg"].removeprefix("Value error, ")
        return message if isinstance(error["input"], dict) else f"{key}: {message}; got {error['input']!r}"
    words = [(_WORDS[e["type"]].format(**e.get("ctx", {})) if e["type"] in _WORDS else e["msg"]) for e in wrong]
    must = dict.fromkeys(words)
    return f"{key}: must be {' or '.join(must)}; got {error['input']!r}"


def _known(kind: type[BaseModel], place: Sequence[object]) -> tuple[str, ...]:
    """The keys of the table at that place in a file."""
    for part in place:
        if part in kind.model_fields:
            kind = next(tables_in(kind.model_fields[str(part)].annotation), kind)
    return tuple(kind.model_fields)


def tables_in(annotation: Any) -> Iterator[type[Section]]:
    """The tables that a value of that type is, or contains."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for inside in get_args(annotation):
        yield from tables_in(inside)


# ---- dotted keys -----------------------------------------------------------------------------------------------------


def place_of(raw: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """The table that a dotted key is in, made where it is not there yet; and the key's name in it. Raises `ConfigError`
    where a part of the key is no table."""
    *path, last = key.split(".")
    table = raw
    for depth, part in enumerate(path, start=1):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{key!r} is no key: {'.'.join(path[:depth])} is a value, not a table.")
    return table, last


def set_in(raw: dict[str, Any], key: str, value: Any) -> None:
    """Set one dotted key in nested tables. Raises `ConfigError` as `place_of`, and for a table of keys in place of one
    that has others."""
    table, last = place_of(raw, key)
    old = table.get(last) if table is raw else None
    if isinstance(old, dict) and isinstance(value, dict) and (lost := sorted({*old} - {*value})):
        raise ConfigError(
            f"{key} = {value!r} would replace the whole table, without {', '.join(lost)}. Say what changes alone, by "
            f"its dotted key: {key}.{next(iter(value), lost[0])} = ..."
        )
    table[last] = value


def flat(table: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """The tables within it as dotted keys: of {"train": {"learning_rate": 0.1}} {"train.learning_rate": 0.1}."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= flat(value, f"{where}{key}.") if isinstance(value, Mapping) else {f"{where}{key}": value}
    return found
