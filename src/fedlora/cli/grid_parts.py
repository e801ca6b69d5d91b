"""Parts of a grid as typed on the command line: `--seeds`, `--only` and `--shard`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from fedlora.errors import ConfigError
from fedlora.experiments.plan import PlannedRun
from fedlora.experiments.spec import Experiment

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


def parse_only(text: str, experiment: Experiment) -> dict[str, list[str]]:
    """Axis -> labels from "task=SST-2,method=GLoRA,method=FedIT". A label may have commas. Raises `ConfigError`."""
    axes = "|".join(map(re.escape, experiment.axes))
    found: dict[str, list[str]] = {}
    for part in re.split(rf",(?=\s*(?:{axes})\s*=)", text):
        axis, equals, label = (word.strip() for word in part.partition("="))
        if not (axis and equals and label):
            raise ConfigError(
                f"--only takes AXIS=LABEL,AXIS=LABEL; got {text!r}. Axes of {experiment.name}: "
                f"{', '.join(experiment.axes)}."
            )
        found.setdefault(axis, []).append(label)
    return found


def parse_shard(text: str) -> Callable[[PlannedRun], bool]:
    """Whether a run belongs to the shard "i/n": the i-th of n parts of all runs, by digest. Raises `ConfigError`."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    number, count = (int(word) for word in match.groups()) if match else (0, 0)
    if not 1 <= number <= count:
        raise ConfigError(f"--shard takes I/N with 1 <= I <= N, such as 1/4; got {text!r}.")
    return lambda run: int(run.digest, 16) % count == number - 1
