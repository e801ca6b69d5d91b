"""Rounds to a target with runs that never get there, and the tables and pictures beside them. Kinds: arithmetic by
hand, structural."""

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
from fedlora.experiments.censored import Reaching, reaching
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


def test_kaplan_and_meier_by_hand(rounds: Grid) -> None:
    """Events in rounds 2 and 4, one run that stopped in 3: of three runs 2/3 are below after 2, and of the one that is
    watched in 4 none after it; median 4. With one event in 5 of three, 2/3 stay below to the end: no median. A run that
    diverged and ended after round 3 is censored at the end of the plan, because it would never have got there."""
    one, half = reaching(rounds, 0.7)
    assert (one.reached, one.censored) == ({0: 2, 1: 4}, {2: 3})
    assert (half.reached, half.censored) == ({0: 5}, {1: 5, 2: 5})
    shares = dict(zip(one.below.quantiles.tolist(), one.below.probabilities.tolist(), strict=True))
    assert shares == pytest.approx({2: 2 / 3, 3: 2 / 3, 4: 0}) and (one.median, half.median) == (4, None)
    assert Reaching({}, {0: 3}, {1: 5}).median == 3, "half of the runs are not below"


def test_the_log_rank_test_by_hand() -> None:
    """Events 1, 2 against 3 and one censored in 4. Expected events of the first: 1/2 + 1/3; variances 1/4 + 2/9;
    z = (2 - 5/6) / sqrt(17/36) = 1.6977, p = erfc(z / sqrt 2) = 0.0896. Nobody gets there: no test."""
    one, other = Reaching({}, {0: 1, 1: 2}, {}), Reaching({}, {0: 3}, {1: 4})
    z = (2 - 5 / 6) / math.sqrt(17 / 36)
    assert one.against(other) == pytest.approx(math.erfc(z / math.sqrt(2)), abs=1e-9) == pytest.approx(0.0896, abs=1e-4)
    assert Reaching({}, {}, {0: 5, 1: 5}).against(Reaching({}, {}, {0: 5, 1: 5})) is None
    assert Reaching({}, {0: 5, 1: 5}, {}).against(Reaching({}, {0: 5, 1: 5}, {})) is None  # all in one round: 0 / 0


def test_the_table_counts_a_censored_run_as_more_than_its_last_round(rounds: Grid) -> None:
    table = tables_of(rounds)[0]
    assert [row[:3] for row in table.rows] == [["1", "2 of 3", "4"], ["0.5", "1 of 3", "> 5"]]
    assert table.rows[0][3] == "" and 0 < float(table.rows[1][3]) < 1, "the reference is not tested against itself"
    assert "validation accuracy reaches 0.7" in table.caption


def test_programs_get_what_the_table_says(rounds: Grid, capsys: pytest.CaptureFixture[str]) -> None:
    """Medians and censored rounds of `test_kaplan_and_meier_by_hand`; p as the table rounds it."""
    show_scores(rounds, "", tables_of(rounds), Format.json)
    one, half = json.loads(capsys.readouterr().out)["cells"]
    assert (one["median"], one["log_rank_p"], one["censored"]) == (4, None, {"2": 3})
    assert (half["median"], half["censored"]) == (None, {"1": 5, "2": 5})
    assert f"{half['log_rank_p']:.2g}" == tables_of(rounds)[0].rows[1][3]
    show_scores(rounds, "", tables_of(rounds), Format.csv)
    told = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(line["median"], line["censored"]) for line in told] == [("4", "2:3"), ("", "1:5 2:5")]
    assert float(told[1]["log_rank_p"]) == half["log_rank_p"] and told[0]["log_rank_p"] == ""


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


def test_a_picture_of_runs_below_the_target(rounds: Grid) -> None:
    """Each line begins at 1 and ends at its last share, but for the little by which lines stand apart."""
    pytest.importorskip("matplotlib")
    from fedlora.experiments.pictures import figures_of

    (axis,) = figures_of(rounds)["target"].axes
    first, second = axis.lines
    assert first.get_xdata() == pytest.approx([0, 2, 3, 4, 4]) and second.get_xdata()[-1] == 5
    assert first.get_ydata() == pytest.approx([1, 2 / 3, 2 / 3, 0, 0], abs=0.01)
    assert second.get_ydata()[-1] == pytest.approx(2 / 3, abs=0.01)
