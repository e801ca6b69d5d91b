"""Parts of a grid as typed on the command line: `--only` and `--shard`."""

from __future__ import annotations

import re
from collections.abc import Callable

from fedlora.errors import ConfigError
from fedlora.experiments.plan import PlannedRun
from fedlora.experiments.spec import Experiment


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
