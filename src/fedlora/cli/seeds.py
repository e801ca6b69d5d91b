"""Seeds as typed on the command line."""

from __future__ import annotations

from collections.abc import Sequence

from fedlora.errors import ConfigError

MOST = 10_000  # more is a typing error, and would not fit in memory


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
    if len(found) > MOST:
        raise ConfigError(f"{option} {text} names {len(found):,} seeds; at most {MOST:,} are allowed.")
    if not found or len({*found}) < len(found):
        what = "names no seed" if not found else "names a seed twice"
        raise ConfigError(f"{option} {text} {what}; it takes seeds as 0:8 (0 to 7), 0,3,5 or 7.")
    return list(found)
