"""What an experiment would run, counted before it is started: runs, and the examples that clients train on."""

from __future__ import annotations

import math
from typing import Any

from fedlora.experiments.grid import Planned, client_count
from fedlora.experiments.tune import Progress
from fedlora.runs.config import RunConfig


def to_do(progress: Progress) -> list[Planned]:
    """The runs without a result. A run that waits for its search is shown by one at the largest value."""
    grid, found = progress.grid, [*progress.missing("search"), *progress.missing("run")]
    waiting = [cell for cell in grid.cells if grid.values and grid.key(cell) not in progress.choices]
    return [*found, *(grid.planned(cell, seed, grid.values[-1], "run") for cell in waiting for seed in grid.seeds)]


def examples(config: RunConfig) -> int | None:
    """The examples that a run's clients train on over all rounds, in whole batches; None if it trains by epochs, which
    only the data can count, or by a program."""
    train, run, count = config.train, config.run, client_count(config)
    if train.command is not None or train.max_steps < 0 or not count:
        return None
    return run.rounds * max(1, math.floor(run.participation * count + 0.5)) * train.max_steps * train.step_size


def row_of(progress: Progress) -> dict[str, Any]:
    """A row of the plan."""
    todo = to_do(progress)
    counts = [examples(run.config) for run in todo]
    return {
        "experiment": progress.grid.experiment.name, "search runs": len(progress.grid.searches), "runs": progress.count,
        "finished": len(progress.used), "to do": len(todo),
        "examples to train": None if None in counts else sum(x for x in counts if x is not None),
    }  # fmt: skip
