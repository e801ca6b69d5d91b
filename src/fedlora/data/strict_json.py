"""JSON as its standard has it, where Python would be lenient, silent, or run out of stack."""

from __future__ import annotations

import json
from typing import Any

from fedlora.errors import repeated


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: no JSON, NaN or Infinity, an object that names a key twice, or one nested too deep to be read.
    """
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_once)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"the key {repeated(name for name, _ in pairs)[0]!r} stands in one object twice")
    return found
