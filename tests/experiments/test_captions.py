"""Tables say what they show: no metric without a unit, and a caption says what the table is made of. Kinds: structural,
oracle."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedlora.experiments import method_tables
from fedlora.experiments.grid import Grid
from fedlora.experiments.method_tables import costs
from fedlora.experiments.page_tables import differences, scores, tables_of
from fedlora.experiments.result import Result, short_config
from fedlora.experiments.scores import KNOWN, SCALES, explained, scale
from fedlora.experiments.spec import Experiment, load_experiment
from fedlora.experiments.table_forms import Table, markdown
from fedlora.training.metrics import METRICS, score_name
from support.made_results import bare

FILE = """
title = "Rules"
question = "Which?"
rows = "rule"
reference = "plain"
[run.model]
path = "demo"
[run.data]
train = "demo"
[run.clients]
count = 3
[axes.rule]
plain = {}
other = { "method.name" = "flexlora" }
[axes.attack]
nobody = {}
somebody = { "train.lr" = 0.5 }
[tune]
key = "train.steps"
values = [1, 2]
over = ["rule"]
seeds = [9]
[profiles.mini]
seeds = [0, 1]
tune = [2]
"""


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    (tmp_path / "rules.toml").write_text(FILE)
    return load_experiment(tmp_path / "rules.toml")


def made(experiment: Experiment, metric: str = "loss", **more: Any) -> dict[str, Result]:
    """One result a run: 0.5 + a tenth of the seed, and 0.2 more for the other rule."""
    found = {}
    for run in Grid(experiment, "mini").runs:
        value = 0.5 + 0.1 * run.seed + (0.2 + 0.01 * run.seed) * (run.cell["rule"] == "other")
        scores = {"loss": value, "accuracy": 1 - value, "perplexity": value}
        raw: dict[str, Any] = {
            "config": short_config(run.config), "metric": metric, "commit": {"id": "a" * 40, "clean": True},
            "test": {"last": scores, "best": scores}, **more,
        }  # fmt: skip
        found[run.digest] = bare(run.digest, [{"round": 1, "metrics": {}, "losses": {"a": 0.3}}], **raw)
    return found


def test_every_metric_has_a_unit_and_every_number_words() -> None:
    assert set(SCALES) == {score_name(name) for name in METRICS}
    for name in KNOWN:
        which = name.replace("to X", "to 0.7")
        said = {explained(which, metric) for metric in ("loss", "accuracy")}
        assert all(len(words) > 25 for words in said), name
        assert len(said) == 2, "of what it is said"


def test_captions_say_unit_seeds_and_which_way_is_better(experiment: Experiment) -> None:
    """By hand: losses are in nats and less is better; accuracy the other way; two seeds everywhere."""

    def said(tables: list[Table]) -> list[str]:
        assert all(table.rows for table in tables)
        return [table.caption for table in tables]

    grid, other = (Grid(experiment, "mini", made(experiment, metric)) for metric in ("loss", "accuracy"))
    means, gaps, *_ = said(tables_of(grid))
    assert "Log-loss in nats on" in means and "standard deviation over seeds" in means
    assert "*train.steps*: " in means and "no search" in means, "the profile has one value"
    assert "after the last round" in means
    assert "Log-loss in nats on" in gaps and "minus that of plain, paired by seed" in gaps
    assert "Negative is better" in gaps and "Positive is better" in said([differences(other)])[0]
    assert "best on validation" in said([differences(grid, "test, best")])[0]


def test_what_a_table_rests_on_stands_below_it(experiment: Experiment) -> None:
    """One label of the clients' own models, one value at the end of its grid: each said once."""
    results = made(experiment)

    def below(made: Callable[..., Table], *words: Any) -> list[str]:
        """Without what a verdict means."""
        found = made(Grid(experiment, "mini", results), *words).below
        return [line for line in found if not line.startswith(("Higher: ", "Lower: ", "Undecided: "))]

    assert [below(scores, ["test, last"]), below(differences)] == [[], []]
    mine = [run for run in Grid(experiment, "mini").runs if run.cell["rule"] == "other"]
    for run in mine:
        results[run.digest] = results[run.digest].model_copy(update={"target": "clients"})
    (own,) = below(differences)
    assert re.match("other: .*the clients' own models.* The others: .*the server's model", own)
    for digest, result in results.items():
        results[digest] = result.model_copy(update={"target": "clients"})
    assert below(scores, ["test, last"])[0].startswith("Every number is the mean")


def test_a_new_column_is_one_line(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what a run costs: an entry, and it is on the screen and in documents."""
    results = made(experiment)
    monkeypatch.setitem(method_tables._COSTS, "round count", lambda runs: str(runs[0].rounds))
    table = costs(Grid(experiment, "mini", results))
    assert table.columns[-1] == "round count" and {row[-1] for row in table.rows} == {"1"}
    assert "round count" in markdown(table)


def test_a_unit_of_every_scale_is_in_its_words() -> None:
    assert scale("macro-f1") == "macro F1 (0 to 1)" and scale("loss") == "log-loss in nats"
