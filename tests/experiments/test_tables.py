"""Rounds to a target with runs that never get there, and further tables and pictures. Kinds: arithmetic by hand,
structural."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedlora.cli.formats import Format
from fedlora.cli.scores import show_scores
from fedlora.experiments.grid import Grid
from fedlora.experiments.method_tables import categories, clients
from fedlora.experiments.page_tables import tables_of
from fedlora.experiments.result import Result, short_config
from fedlora.experiments.spec import Experiment, load_experiment
from support.made_results import bare

FILE = """
title = "Numbers"
question = "Which?"
rows = "rho"
reference = "1"
metric = "{metric}"
[run.model]
path = "demo"
[run.data]
train = "demo"
[run.clients]
count = 3
[run.run]
rounds = 5
[axes.rho]
"1" = {{}}
"0.5" = {{ "method.name" = "glora", "method.rho" = 0.5 }}
[axes.lr]
"1e-3" = {{ "train.lr" = 1e-3 }}
"1e-2" = {{ "train.lr" = 1e-2 }}
[axes.split]
even = {{}}
odd = {{ "clients.alpha" = 0.5 }}
[profiles.mini]
seeds = [0, 1, 2]
axes = {axes}
"""
ONE = '{ lr = ["1e-3"], split = ["even"] }'
# rho -> seed -> the round at 0.7; 0: never; -3: never, stopped early after round 3; None: diverged, and ended after 3
WHEN = {"1": {0: 2, 1: 4, 2: -3}, "0.5": {0: 5, 1: 0, 2: None}}


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Pictures that a test only looks at are not kept open."""
    yield
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.close("all")


def experiment_of(folder: Path, metric: str, axes: str) -> Experiment:
    (folder / "numbers.toml").write_text(FILE.format(metric=metric, axes=axes))
    return load_experiment(folder / "numbers.toml")


def results_of(experiment: Experiment) -> dict[str, Result]:
    """Accuracy 0.5, and 0.8 from the round of `WHEN`; on the test set 0.6 + 0.2 rho, and 0.01 more for each seed."""
    found = {}
    for run in Grid(experiment, "mini").runs:
        when = WHEN[run.cell["rho"]][run.seed]
        curve = [0.8 if when and t >= when > 0 else 0.5 for t in range(1, 6)]
        if when is None or when < 0:
            curve = [0.5, 0.5, math.nan if when is None else 0.5]
        history = [
            {"round": t, "metrics": {"accuracy": None if math.isnan(x) else x, "test/accuracy": x / 2}, "losses": {}}
            for t, x in enumerate(curve, start=1)
        ]
        held = {"accuracy": 0.6 + 0.2 * float(run.cell["rho"]) + 0.01 * run.seed}
        categories = {"one": "Easy", "two": "Easy", "three": "Hard"}
        held |= {"group/one": 0.4, "group/two": 0.6, "group/three": 0.1 * float(run.cell["rho"])}
        found[run.digest] = bare(
            run.digest, history, config=short_config(run.config), test={"last": held, "best": held},
            categories=categories, ranks={"a": 2, "b": 4},
            clients_at_end={"a": {"accuracy": 0.3}, "b": {"accuracy": 0.1 * run.seed}},
        )  # fmt: skip
    return found


@pytest.fixture
def rounds(tmp_path: Path) -> Grid:
    experiment = experiment_of(tmp_path, "rounds to 0.7", ONE)
    return Grid(experiment, "mini", results_of(experiment))


def test_a_run_that_never_gets_there_counts_as_the_worst(rounds: Grid, capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: of 2, 4 and never the median is 4; of 5, never and never it is never. Programs get the same."""
    table = tables_of(rounds)[0]
    assert [*table.rows] == [["1", "4", "1 of 3"], ["0.5", "never", "2 of 3"]]
    assert "validation accuracy reaches 0.7" in table.caption
    show_scores(rounds, "", tables_of(rounds), Format.json)
    assert [cell["median"] for cell in json.loads(capsys.readouterr().out)["cells"]] == [4, None]
    show_scores(rounds, "", tables_of(rounds), Format.csv)
    assert [line["median"] for line in csv.DictReader(io.StringIO(capsys.readouterr().out))] == ["4", ""]


def test_categories_and_clients_stand_by_set_up(tmp_path: Path) -> None:
    """Easy is the mean of 0.4 and 0.6; Hard a tenth of rho; client b's mean over the seeds 0, 0.1, 0.2 is 0.1."""
    experiment = experiment_of(tmp_path, "test, last", '{ lr = ["1e-3"] }')
    grid = Grid(experiment, "mini", results_of(experiment))
    table = categories(grid, "test, last")
    assert table.columns == ["category", "1", "1", "0.5", "0.5"] and table.over == ["", "even", "odd", "even", "odd"]
    assert table.rows == [["Easy", *["0.500"] * 4], ["Hard", "0.100", "0.100", "0.050", "0.050"]]
    each = clients(grid)
    assert each.rows == [["a (2)", *["0.300"] * 4], ["b (4)", *["0.100"] * 4]]


def test_a_picture_over_an_axis_of_numbers(tmp_path: Path) -> None:
    """One line a split, x at rho, y the mean 0.6 + 0.2 rho + 0.01; with a second axis of numbers a map a split."""
    pytest.importorskip("matplotlib")
    from fedlora.experiments.pictures import figures_of

    experiment = experiment_of(tmp_path, "test, last", '{ lr = ["1e-3"] }')
    figures = figures_of(Grid(experiment, "mini", results_of(experiment)))
    assert [*figures] == ["numbers", "curves", "test-curves", "categories"]
    (axis,) = figures["numbers"].axes
    assert [line.get_label() for line in axis.containers] == ["even", "odd"]
    for container in axis.containers:
        assert container[0].get_xdata() == pytest.approx([0.5, 1.0])
        assert container[0].get_ydata() == pytest.approx([0.71, 0.81])
    assert figures["test-curves"].axes[0].get_ylabel() == "test accuracy"

    experiment = experiment_of(tmp_path, "test, last", "{}")
    maps = figures_of(Grid(experiment, "mini", results_of(experiment)))["numbers"]
    panels = [axis for axis in maps.axes if axis.get_ylabel() == "rho"]
    assert [axis.get_title(loc="left") for axis in panels] == ["even", "odd"]
    for axis in panels:
        assert [text.get_text() for text in axis.get_yticklabels()] == ["0.5", "1"]
        assert [text.get_text() for text in axis.texts] == [".810", ".810", ".710", ".710"]
