"""Parts of a grid as typed on the command line: `--seeds`, `--filter` and `--tune`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from fedlora.cli.options import numbers
from fedlora.errors import ConfigError
from fedlora.experiments.spec import NOT_TO_SEARCH, Tune

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


def parse_only(text: str, axes: Mapping[str, object]) -> dict[str, list[str]]:
    """Axis -> labels from "task=SST-2,method=GLoRA,method=FedIT". A label may have commas. Raises `ConfigError`."""
    found: dict[str, list[str]] = {}
    for part in re.split(rf",(?=\s*(?:{'|'.join(map(re.escape, axes))})\s*=)", text):
        axis, equals, label = (word.strip() for word in part.partition("="))
        if not (axis and equals and label):
            raise ConfigError(f"--filter takes AXIS=LABEL,AXIS=LABEL; got {text!r}. The axes are {', '.join(axes)}.")
        found.setdefault(axis, []).append(label)
    return found


def parse_tune(text: str, seeds: Sequence[int]) -> Tune:
    """A search from "KEY=VALUE,VALUE,...", for each method. Raises `ConfigError`."""
    key, _, values = text.partition("=")
    found = numbers(values, f"--tune {key.strip() or 'KEY'}=NUMBERS (as train.learning_rate=1e-3,3e-3,1e-2)")
    if key.strip() in NOT_TO_SEARCH:
        raise ConfigError(f"--tune: {key.strip()} is not a setting that can be searched.")
    if len({*found}) < len(found):
        raise ConfigError(f"--tune {text} names a value twice.")
    return Tune(key=key.strip(), values=found, over=["method"], seeds=list(seeds))
