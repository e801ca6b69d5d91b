"""An experiment of two methods in one set-up and its runs, made up: small, so that every command takes little."""

from __future__ import annotations

from pathlib import Path

from fedlora.experiments.grid import Grid
from fedlora.experiments.spec import load_experiment
from support.made_results import whole, write_result

SMALL = """
title = "Small"
question = "Which?"
rows = "method"
reference = "old"
metric = "test, last"
[run.model]
path = "demo"
[run.data]
train = "demo"
[run.evaluate]
metric = "loss"
[run.run]
rounds = 2
[axes.setup]
here = {}
[axes.method]
old = { "method.name" = "fedit" }
new = { "method.name" = "glora" }
[profiles.mini]
seeds = [0, 1, 2, 3]
"""


def small_world(place: Path) -> Path:
    """experiments/small.toml, and the results of its profile in results: log-loss 0.6, of `new` 0.1 less, and of a seed
    its hundredth more."""
    (place / "experiments").mkdir(parents=True)
    (place / "experiments" / "small.toml").write_text(SMALL)
    for run in Grid(load_experiment(place / "experiments" / "small.toml"), "mini").runs:
        new = run.cell["method"] == "new"
        loss = 0.6 - 0.1 * new + 0.01 * run.seed + 0.001 * new * (run.seed % 2)
        write_result(place / "results", whole(run, "loss", {"loss": round(loss, 4), "accuracy": 0.5 + loss / 10}))
    return place


def where(place: Path) -> list[str]:
    """Options of a command."""
    parts = ("experiments", "results", "work")
    return [word for part in parts for word in (f"--{part}", str(place / part))]
