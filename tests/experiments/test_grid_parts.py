"""Parts of a grid: `--only` some labels, one `--shard` of several machines. Kind: by hand."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest

from fedlora.cli.grid_parts import parse_only, parse_shard
from fedlora.errors import ConfigError
from fedlora.experiments.grid import Grid
from fedlora.experiments.spec import Experiment, load_experiment
from support.command_line import invoke
from support.made_results import bare

GRID = """
title = "t"
question = "q"
[run.model]
path = "demo"
[run.data]
task = "sst2"
[run.clients]
count = 2
[run.run]
rounds = 1
[axes.task]
"SST-2" = { "data.max_length" = 16 }
QNLI = { "data.max_length" = 32 }
[axes.method]
FedIT = { "method.name" = "fedit" }
"GLoRA, rho = 0.5" = { "method.name" = "glora", "method.rho" = 0.5 }
SVD = { "method.name" = "svd" }
[tune]
values = [1e-3, 1e-2]
over = ["method"]
seeds = [7]
[profiles.mini]
seeds = [0, 1]
[profiles.small]
seeds = [0]
axes = { method = ["FedIT", "SVD"] }
"""


@pytest.fixture
def grid(tmp_path: Path) -> Experiment:
    (tmp_path / "grid.toml").write_text(GRID)
    return load_experiment(tmp_path / "grid.toml")


def test_some_labels_run_as_they_do_in_the_whole_grid(grid: Experiment) -> None:
    """Of 2 tasks, 3 methods, 2 seeds: one task and two methods are four runs. Each method's rate is searched over both
    tasks, 2 x 2 runs; that gives another best than the wanted task's own: (0.6 + 0.9) / 2 against (0.7 + 0.2) / 2."""
    part = grid.narrowed("mini", parse_only("task=SST-2, method = GLoRA, rho = 0.5,method=SVD", grid))
    search = Grid(part, "mini").searches
    assert {run.digest for run in search} < {run.digest for run in Grid(grid, "mini").searches} and len(search) == 8
    assert len(Grid(part, "mini").waiting) == 4
    best = {("SST-2", 1e-3): 0.6, ("QNLI", 1e-3): 0.9, ("SST-2", 1e-2): 0.7, ("QNLI", 1e-2): 0.2}
    found = {}
    for run in Grid(grid, "mini").searches:
        line = {"round": 1, "metrics": {"accuracy": best[run.cell["task"], run.tuned or 0.0]}}
        found[run.digest] = bare(run.digest, [line], best_round=1)
    runs, whole = Grid(part, "mini", found).runs, Grid(grid, "mini", found).runs
    assert len(whole) == 12 and {run.tuned for run in whole} == {1e-3}
    assert [run.digest for run in runs] == [
        run.digest for run in whole if run.cell["task"] == "SST-2" and run.cell["method"] != "FedIT"
    ]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("job=SST-2", r"has no axis 'job'; it has task, method\."),
        ("task=SST", r"profile small, has no 'SST'; it has 'SST-2', 'QNLI'\."),
        ("method=GLoRA, rho = 0.5", r"profile small, has no 'GLoRA, rho = 0\.5'; it has 'FedIT', 'SVD'\."),
        ("SST-2", r"takes AXIS=LABEL,AXIS=LABEL; got 'SST-2'\. Axes of grid: task, method\."),
    ],
)
def test_a_label_that_is_none_is_refused_with_those_there_are(grid: Experiment, text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        grid.narrowed("small", parse_only(text, grid))


def test_each_run_belongs_to_one_shard(grid: Experiment) -> None:
    runs = Grid(grid, "mini").searches
    shards = [[run.digest for run in runs if parse_shard(f"{k}/3")(run)] for k in (1, 2, 3)]
    assert sorted(chain(*shards)) == sorted(run.digest for run in runs) and all(shards)


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", "1/0"])
def test_a_shard_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"1 <= I <= N, such as 1/4; got"):
        parse_shard(text)


def test_plan_and_status_of_some_labels(grid: Experiment, tmp_path: Path) -> None:
    """By hand, as above: 8 runs of the search, 4 that count."""
    assert grid.folder is not None
    place = ["--results", tmp_path / "results", "--work", tmp_path / "work"]
    only = ["--only", "task=SST-2,method=GLoRA, rho = 0.5,method=SVD", *place]
    told = json.loads(invoke("experiment", "status", grid.folder / "grid.toml", "--json", *only).stdout)
    assert told["grid"] == {"search": [0, 8], "runs": [0, 4], "failed": 0, "to_do": 4}
    shown = invoke("experiment", "run", grid.folder / "grid.toml", "--plan", *only).stdout
    assert [word.strip() for word in shown.split("grid")[1].split("│")[1:4]] == ["8", "4", "0"], shown
    refused = invoke("experiment", "run", grid.folder / "grid.toml", "--plan", "--shard", "1/2", *place, code=1)
    assert isinstance(refused.exception, ConfigError) and "leave --shard out" in str(refused.exception)
