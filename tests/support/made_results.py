"""Lines of results of runs that nobody made."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedlora.experiments.grid import Grid, Planned
from fedlora.experiments.spec import Experiment
from fedlora.experiments.tune import Progress

Scores = Mapping[str, float | None]


def line(run: Planned, scores: Scores, curve: Sequence[Scores] = (), **more: Any) -> dict[str, Any]:
    """A finished run's line: these scores on each set, best and last. curve: on validation, by round."""
    names = dict.fromkeys(name for each in curve for name in each)
    return {
        "digest": run.digest, "experiment": run.experiment, "cell": dict(run.cell), "seed": run.seed,
        "value": run.value, "stage": run.stage, "method": run.config.method.name, "metric": "accuracy",
        "target": "server", "rounds": run.config.run.rounds, "best_round": 1, "own_data": [], "categories": {},
        "ranks": {"a": 8}, "classes": 2, "gauge_drift": {}, "privacy": None, "clients_at_end": {},
        "validation": {"last": dict(scores), "best": dict(scores)},
        "test": {"last": dict(scores), "best": dict(scores)},
        "probes": {"best": {}, "last": {}},
        "bytes": {"up_adapter": 3e6, "up_heads": 1e6, "total": 6e6}, "seconds": {"train": 3.0, "aggregate": 0.5},
        "history": {
            "evaluated": [k for k, _ in enumerate(curve, start=1)],
            "scores": {name: [each.get(name) for each in curve] for name in names}, "losses": {"a": [1.0, 0.5]},
        },
        "config": json.loads(run.config.canonical()), "read": {"model": "m", "data": f"d{run.seed}"},
        "commit": "c" * 12, "machine": "cpu", "versions": {}, **more,
    }  # fmt: skip


def progress_of(
    experiment: Experiment, made: Callable[[Planned], Mapping[str, Any] | None], profile: str = "mini"
) -> Progress:
    """The experiment with a line for each run of which `made` makes one: first the search's, then what it chooses."""
    grid = Grid(experiment, profile)
    lines = {run.digest: found for run in grid.searches if (found := made(run)) is not None}
    runs = Progress(grid, lines).runs
    return Progress(grid, {**lines, **{run.digest: found for run in runs if (found := made(run)) is not None}})
