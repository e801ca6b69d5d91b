"""Scores by epsilon: what each cell spent, the picture.

Kinds: oracle, hostile, end-to-end. Results are made up here, with numbers whose means are known.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fedlora.errors import ConfigError
from fedlora.experiments.budgets import budget_rows, spendings
from fedlora.experiments.grid import Grid
from fedlora.experiments.result import Result, Spent
from fedlora.experiments.spec import Experiment, load_experiment
from fedlora.experiments.store import gather
from support.command_line import invoke
from support.made_results import stored as as_stored
from support.made_results import whole

FILE = """
title = "What epsilon costs"
question = "How much?"
rows = "epsilon"
budgets = { axis = "epsilon", none = "no privacy", lines = "clients" }
[run.model]
path = "demo"
[run.method]
name = "ffa-lora"
[run.data]
train = "demo"
[axes.clients]
6 = { "clients.count" = 6, "privacy.delta" = 1e-2 }
50 = { "clients.count" = 50, "privacy.delta" = 1e-3 }
[axes.epsilon]
"no privacy" = { privacy = {} }
"clip alone" = { "privacy.clip" = 1.0, "privacy.noise_multiplier" = 0.01 }
8 = { "privacy.clip" = 1.0, "privacy.epsilon" = 8.0 }
[profiles.mini]
seeds = [0, 1]
"""


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    (tmp_path / "tiny.toml").write_text(FILE)
    return load_experiment(tmp_path / "tiny.toml")


def stored(experiment: Experiment) -> dict[str, Result]:
    """Accuracy 0.7 and 0.8 on the two seeds everywhere, log-loss 0.5; epsilon 7.9912 where there is privacy."""
    found = {}
    for run in Grid(experiment, "mini").runs:
        raw = whole(run, "accuracy", {"accuracy": 0.7 + 0.1 * run.seed, "loss": 0.5})
        raw["commit"] = {"id": "abcdef0123", "clean": True}
        if run.config.privacy is not None:
            raw["privacy"] = {
                "epsilon_planned": 7.9912 if run.cell["epsilon"] == "8" else 40658.0,
                "delta": run.config.privacy.delta, "noise_multiplier": 1.155, "sampling": 1.0, "rounds_planned": 8,
                "clip": 1.0,
            }  # fmt: skip
        found[run.digest] = as_stored(raw)
    return found


def test_a_label_takes_the_table_away_and_the_others_make_it(experiment: Experiment) -> None:
    told = {(run.cell["clients"], run.cell["epsilon"]): run.config.privacy for run in Grid(experiment, "mini").runs}
    assert told["6", "no privacy"] is None and told["50", "no privacy"] is None
    six, fifty = told["6", "8"], told["50", "8"]
    assert six is not None and fifty is not None and (six.delta, fifty.delta) == (1e-2, 1e-3)


def test_the_table_says_what_was_spent_and_epsilon_is_rounded_up(experiment: Experiment) -> None:
    """Mean of 0.7 and 0.8 is 0.75, their standard deviation 0.0707; 7.9912 is at most 8.00, never 7.99."""
    columns, rows = budget_rows(spendings(Grid(experiment, "mini", stored(experiment))), "clients")
    assert columns[0] == "clients" and len(rows) == 6
    assert rows[0] == ["6", "none", "", "", "", "", "0.750 ± 0.071", "0.500 ± 0.000", "2"]
    assert rows[1][1] == "none (clip alone)"
    assert rows[2] == ["6", "8.00", "0.01", "1.155", "1", "8", "0.750 ± 0.071", "0.500 ± 0.000", "2"]


def test_runs_of_a_cell_that_spent_differently_are_no_cell(experiment: Experiment) -> None:
    results = stored(experiment)
    run = next(run for run in Grid(experiment, "mini").runs if run.cell["epsilon"] == "8")
    spent = results[run.digest].privacy
    assert isinstance(spent, Spent)
    other = spent.model_copy(update={"epsilon_planned": 3.0})
    results[run.digest] = results[run.digest].model_copy(update={"privacy": other})
    with pytest.raises(ConfigError, match=r"6, 8: .*spent different"):
        spendings(Grid(experiment, "mini", results))
    results[run.digest] = results[run.digest].model_copy(update={"privacy": None})
    with pytest.raises(ConfigError, match=r"1 of its 2 runs .*privacy.*budgets.none"):
        spendings(Grid(experiment, "mini", results))


def test_the_label_without_privacy_has_none(experiment: Experiment, tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(FILE.replace('none = "no privacy"', 'none = "8"'))
    other = load_experiment(tmp_path / "tiny.toml")
    with pytest.raises(ConfigError, match=r"no privacy: 0 of its 2 "):
        spendings(Grid(other, "mini", stored(experiment)))


def test_axes_that_are_not_there_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(FILE.replace('lines = "clients"', 'lines = "ranks"'))
    with pytest.raises(ConfigError, match="two axes"):
        load_experiment(tmp_path / "x.toml")
    (tmp_path / "x.toml").write_text(FILE.replace('none = "no privacy"', 'none = "nothing"'))
    with pytest.raises(ConfigError, match="budgets names epsilon = 'nothing'"):
        load_experiment(tmp_path / "x.toml")


def test_the_picture_is_drawn_of_whole_and_of_half_grids(experiment: Experiment, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from fedlora.experiments.picture_style import save
    from fedlora.experiments.pictures import figures_of

    results = stored(experiment)
    for some in (results, dict(list(results.items())[:1]), dict(list(results.items())[-1:])):
        figures = figures_of(Grid(experiment, "mini", some))
        (made,) = save(figures["budgets"], tmp_path / "p.png")
        assert made.stat().st_size > 10_000


def test_the_command_line_draws_and_tells(experiment: Experiment, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for result in stored(experiment).values():
        gather(tmp_path / "results", "tiny", result)
    where = ("--experiments", tmp_path, "--results", tmp_path / "results")
    invoke("experiment", "plot", "tiny", *where, "--work", tmp_path)
    assert (tmp_path / "results" / "plots" / "tiny-mini.png").is_file()
    said = invoke("experiment", "table", "tiny", *where, "--work", tmp_path, "--format", "markdown").output
    table = " ".join(said.split())
    assert "8.00" in table and "account of anybody's data" in table


def test_a_tick_of_the_picture_never_understates_epsilon() -> None:
    """By hand: the tenth at or above. 1.1 * 10 is 11.000000000000002 in floats, and stays 1.1."""
    pytest.importorskip("matplotlib")
    from fedlora.experiments.budget_picture import _tenth_up

    assert [_tenth_up(e) for e in (13.603, 8.0, 1.1, 0.02)] == [13.7, 8.0, 1.1, 0.1]
