"""What becomes of a mean where one seed has no number: it never got there, diverged, failed, or is not run yet.
Kind of evidence: *by hand*.

Seeds 0 to 4 of two methods. The reference takes 10, 20, 30, 40, 50 rounds; the other 5 rounds on four seeds, and never
gets there on the fifth. The mean of what it has is 5, and would make the one that fails the better one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fedlora.experiments.curve_pictures import curves_of
from fedlora.experiments.dot_pictures import dots_figure, dots_of
from fedlora.experiments.grid import Grid
from fedlora.experiments.method_tables import places
from fedlora.experiments.page_tables import differences, scores
from fedlora.experiments.pictures import comparison_figure
from fedlora.experiments.result import Result
from fedlora.experiments.spec import load_experiment
from fedlora.experiments.tables import CellScore, orders, paired, placings, score_cells, without_number
from support.made_results import stored, whole

EXPERIMENT = """title = "t"
question = "q"
reference = "slow"
[run.model]
path = "m"
[run.data]
train = "x.csv"
[run.clients]
ranks = [2]
[run.run]
rounds = 50
[axes.method]
slow = { "method.name" = "glora" }
fast = { "method.name" = "fedit" }
[profiles.mini]
seeds = [0, 1, 2, 3, 4]
metric = "rounds to 0.9"
"""
FIFTH = ("never", "diverged", "failed", "not run")


def made(tmp_path: Path, fifth: str) -> tuple[Any, dict[str, Result], dict[str, str]]:
    (tmp_path / "e.toml").write_text(EXPERIMENT)
    experiment, results, failed = load_experiment(tmp_path / "e.toml"), {}, {}
    for run in Grid(experiment, "mini").runs:
        fast = run.cell["method"] == "fast"
        at: float = 5 if fast else 10 * (run.seed + 1)
        raw = whole(run, "accuracy", {"accuracy": 0.95})
        if fast and run.seed == 4:
            if fifth == "not run":
                continue
            if fifth == "failed":
                failed[run.digest] = "ValueError"
                continue
            at = 1e9
        for line in raw["history"]:
            diverged = at == 1e9 and fifth == "diverged"
            line["metrics"] = {"accuracy": float("nan") if diverged else 0.95 if line["round"] >= at else 0.1}
        results[run.digest] = stored(raw)
    return experiment, results, failed


@pytest.mark.parametrize("fifth", FIFTH)
def test_no_mean_and_no_difference_where_a_run_has_no_number(tmp_path: Path, fifth: str) -> None:
    """Not run yet is another thing: four of five planned is said, and they may be averaged."""
    experiment, results, failed = made(tmp_path, fifth)
    cells = score_cells(Grid(experiment, "mini", results, failed))
    slow, fast = cells
    assert (slow.mean, slow.median, fast.median) == (30, 30, 5)
    grid = Grid(experiment, "mini", results, failed)
    means, gaps = scores(grid, ["rounds to 0.9"]), differences(grid)
    [_, row] = means.rows
    if fifth == "not run":
        assert fast.mean == 5 and len(fast.scores) == 4 and fast.planned == 5 and without_number(cells) == []
        assert len(paired(cells, "method", "slow")) == 1 and row[1:] == ["5.0000 ± 0.0000", "4 of 5"]
        return
    assert fast.mean is None and fast.spread is None and fast.none == (4,)
    assert row[1] == "median 5.0000; 4 of 5 have a number"
    assert paired(cells, "method", "slow") == [] == gaps.rows
    for said in (without_number(cells), means.below, gaps.below):
        assert any("fast: no number on seed 4: " in line for line in said)
    [first, second] = placings(cells, "method")
    assert first.counts == (1, 4) and second.counts == (4, 1), "the one that never gets there is last on that seed"
    assert orders(cells) == (2, 5)


def test_those_without_a_number_share_the_last_place() -> None:
    """By hand: on seed 0 nobody gets there, and nobody is first; on seed 1 "a" does, and the two others are last."""
    cells = [CellScore({"method": m}, {1: 5.0} if m == "a" else {}, 2, None, none=(0, 1)[: 2 - (m == "a")], less=True)
             for m in "abc"]  # fmt: skip
    assert [p.counts for p in placings(cells, "method")] == [(1, 0, 1), (0, 0, 2), (0, 0, 2)]


def test_a_median_is_there_while_it_has_a_number() -> None:
    """Of five with two missing it is the third best, 30; of four with two missing it falls on a missing one."""
    five = CellScore({}, {0: 10.0, 1: 30.0, 2: 20.0}, 5, None, none=(3, 4), less=True)
    assert five.median == 30 and five.words() == "median 30.0000; 3 of 5 have a number"
    four = CellScore({}, {0: 10.0, 1: 30.0}, 4, None, none=(3, 4), less=True)
    assert four.median is None and four.words() == "2 of 4 have a number"
    up = CellScore({}, {0: 0.9, 1: 0.7, 2: 0.8}, 4, None, none=(3,))
    assert up.median == pytest.approx(0.75), "0.9, 0.8, 0.7 and a worse one"
    assert CellScore({}, {}, 2, None, none=(0, 1)).words() == "0 of 2 have a number"


METRICS = """
[axes.measure]
share = {}
nats = { "evaluate.metric" = "loss" }
"""


def of_two_metrics(tmp_path: Path, text: str) -> Grid:
    """Two cells of accuracy 0.5 + method / 10 and two of loss, on five seeds; "fast" is better by both."""
    (tmp_path / "e.toml").write_text(text)
    experiment, results = load_experiment(tmp_path / "e.toml"), {}
    for run in Grid(experiment, "mini").runs:
        metric = "loss" if run.cell["measure"] == "nats" else "accuracy"
        gain = (0.1 if run.cell["method"] == "fast" else 0.0) + run.seed / 100 * (run.cell["method"] == "fast")
        score = {"accuracy": 0.5 + gain, "loss": 0.9 - gain}
        results[run.digest] = stored(whole(run, metric, score))
    return Grid(experiment, "mini", results)


def test_numbers_of_two_metrics_are_never_subtracted(tmp_path: Path) -> None:
    """By hand: accuracy 0.5 against log-loss 0.9 would be a gap of 0.4, of no unit."""
    last = EXPERIMENT.replace("rounds to 0.9", "test, last") + METRICS
    by_metric = last.replace('reference = "slow"', 'rows = "measure"\nreference = "share"')
    measured = of_two_metrics(tmp_path, by_metric)
    cells = score_cells(measured)
    assert paired(cells, "measure", "share") == [] == placings(cells, "measure") == dots_of(measured)
    for table in (scores(measured, ["test, last"]), differences(measured)):
        below = " ".join(table.below)
        assert "share" in below and "accuracy" in below and "log-loss" in below and "evaluate.metric" in below
    titles = {title: [*lines] for title, lines in curves_of(measured).items()}
    assert sorted(titles.values()) == [["nats"], ["nats"], ["share"], ["share"]], "one panel has one metric"


def test_beside_each_other_two_metrics_have_their_own_directions(tmp_path: Path) -> None:
    """fast is better by both: right of zero in each panel, though its loss is lower and its accuracy higher."""
    grid = of_two_metrics(tmp_path, EXPERIMENT.replace("rounds to 0.9", "test, last") + METRICS)
    panels = dots_of(grid)
    assert {panel.title: (panel.metric, panel.up) for panel in panels} == {
        "share": ("accuracy", 1.0), "nats": ("loss", -1.0),
    }  # fmt: skip
    assert all(panel.up * d.mean > 0 for panel in panels for d in panel.rows) and dots_figure(grid) is not None
    caption = differences(grid).caption
    directions = re.findall(r"(positive|negative) is better of (accuracy|log-loss)", caption, re.IGNORECASE)
    assert [(sign.lower(), metric) for sign, metric in directions] == [
        ("positive", "accuracy"),
        ("negative", "log-loss"),
    ]
    table = scores(grid, ["test, last", "test, best"])
    assert table.columns.count("metric") == 1 and "Accuracy" in table.caption and "log-loss" in table.caption


@pytest.mark.parametrize("kind", ["data.clients", "clients.own_test", "one test set", "all by clients"])
def test_clients_on_their_own_data_are_not_set_against_a_server(tmp_path: Path, kind: str) -> None:
    """Each client on its own test part answers another question than a server on the common set (methods.md): shown,
    and no difference, place or dot; on one test set, or where all are the clients', it is compared as before."""
    text = EXPERIMENT.replace("rounds to 0.9", "test, last")
    if kind != "one test set":
        files = 'clients = { a = "a.csv", b = "b.csv" }'
        text = text.replace('train = "x.csv"', files) if kind != "clients.own_test" else text
        text = text.replace("ranks = [2]", "ranks = [2]\nown_test = 0.3") if kind == "clients.own_test" else text
    (tmp_path / "e.toml").write_text(text)
    experiment, results = load_experiment(tmp_path / "e.toml"), {}
    for run in Grid(experiment, "mini").runs:
        fast = run.cell["method"] == "fast"
        target = "clients" if fast or kind == "all by clients" else "server"
        raw = whole(run, "accuracy", {"accuracy": 0.5 + fast / 10 + run.seed * fast / 100})
        results[run.digest] = stored({**raw, "target": target})
    grid = Grid(experiment, "mini", results)
    cells = score_cells(grid)
    assert [row[0] for row in scores(grid, ["test, last"]).rows] == ["slow", "fast"], "both are shown"
    below = " ".join(differences(grid).below)
    if kind in ("data.clients", "clients.own_test"):
        assert paired(cells, "method", "slow") == [] == placings(cells, "method") == dots_of(grid)
        assert places(grid).rows == [] and "on the same data" not in below
        assert "fast" in below and "evaluate.target" in below and "evaluate.clients_at_end" in below
        whole_figure = comparison_figure(grid, ["slow", "fast"])
        together = kind == "clients.own_test"  # it gives test data of their own, and no validation data
        assert whole_figure is not None and len(whole_figure.axes) == (1 if together else 2), "no method is left out"
        number = score_cells(grid, "validation, best")
        assert bool(paired(number, "method", "slow")) is together
    else:
        assert len(paired(cells, "method", "slow")) == 1 == len(dots_of(grid)) and len(placings(cells, "method")) == 2
        assert ("on the same data" in below) is (kind == "one test set")
    assert "clients' own models" in below
