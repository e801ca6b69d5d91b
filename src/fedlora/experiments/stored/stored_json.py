"""JSON files that anybody may have changed: a table of keys with plain numbers, or an error that says why not."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

_DIGITS = 18  # of a whole number; more is no count of anything
_SHOWN = 60


class Stored(BaseModel):
    """A table of a stored file, each value of its own type: no word stands for a number, and true is no 1. Keys beyond
    those that are named may be there: a newer version notes more."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", allow_inf_nan=False)


def read_table(path: Path) -> dict[str, Any]:
    """The file's table. Numbers are finite, whole ones have at most 18 digits, no key stands twice, and text is text.

    Raises:
        OSError: it cannot be read. `FileNotFoundError` where there is nothing by that name.
        ValueError: it is no such file, with the reason in words.
    """
    if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
        raise ValueError("it is no file")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 (byte {error.start})") from error
    try:
        found = json.loads(text, parse_float=_real, parse_int=_whole, parse_constant=_none, object_pairs_hook=_table)
        if "\\u" in text:
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except UnicodeEncodeError as error:
        raise ValueError("it has half a character (a lone surrogate)") from error
    if not isinstance(found, dict):
        raise ValueError("it is no table of keys")
    return found


def wrong_values(error: ValidationError) -> str:
    """The first three things that are wrong, each by its key and value."""
    each = [_wrong(e) for e in error.errors(include_url=False)]
    more = f"; and {len(each) - 3} more" if len(each) > 3 else ""
    return "; ".join(each[:3]) + more


def shown(value: object) -> str:
    """A value in a message: short, on one line."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _wrong(e: Any) -> str:
    key = key_of([part for part in e["loc"] if part not in ("int", "float", "str", "none")])
    message = e["msg"].removeprefix("Value error, ")
    if e["type"] == "missing":
        return f"{key} is missing"
    if e["type"] == "value_error":
        return f"{key}: {message}" if key else message
    return f"{key} is {shown(e['input'])}: {message[:1].lower()}{message[1:]}"


def key_of(parts: Sequence[int | str]) -> str:
    """As a reader of the file would write it: mergers.GLoRA.test.loss."""
    return ".".join(str(part)[:_SHOWN] for part in parts)


def _real(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.20} is more than a number can be")
    return value


def _whole(text: str) -> int:
    if len(text.lstrip("-")) > _DIGITS:
        raise ValueError(f"a whole number of {len(text)} digits ({text:.12}...)")
    return int(text)


def _none(text: str) -> float:
    raise ValueError(f"{text} is no number in JSON")


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {shown(twice)} stands in it twice")
    return found
