"""What a rule costs in peace and saves under attack, and the plan of the robustness experiment. Kinds: oracle,
structural."""

from __future__ import annotations

import json
from math import isnan
from pathlib import Path
from statistics import fmean, stdev

import pytest

from fedlora.errors import ConfigError
from fedlora.experiments.grid import Grid
from fedlora.experiments.places import Places
from fedlora.experiments.prices import price_rows, prices
from fedlora.experiments.result import Result
from fedlora.experiments.spec import Experiment, load_experiment
from fedlora.experiments.store import gather
from fedlora.runs.attack_words import attacks_of
from support.command_line import invoke
from support.made_results import stored, whole

ROOT = Path(__file__).parents[2]
GRID = """
title = "t"
question = "q"
rows = "rule"
reference = "none"
peace = { axis = "attack", label = "none" }
[run.model]
path = "demo"
[run.data]
train = "demo"
[run.clients]
count = 5
[axes.rule]
none = {}
slow = { "train.lr" = 1e-3 }
[axes.attack]
none = {}
flip = { "attack.kind" = "sign-flip", "attack.share" = 0.2 }
[profiles.mini]
seeds = [0, 1, 2]
[profiles.paper]
seeds = [0]
"""
LOSS = {  # (rule, attack) -> by seed
    ("none", "none"): (0.50, 0.52, 0.54), ("slow", "none"): (0.53, 0.54, 0.58),
    ("none", "flip"): (0.90, 1.00, 0.80), ("slow", "flip"): (0.60, 0.62, 0.58),
}  # fmt: skip


@pytest.fixture
def grid(tmp_path: Path) -> Experiment:
    (tmp_path / "grid.toml").write_text(GRID)
    return load_experiment(tmp_path / "grid.toml")


def results(experiment: Experiment) -> dict[str, Result]:
    found = {}
    for run in Grid(experiment, "mini").runs:
        loss = LOSS[run.cell["rule"], run.cell["attack"]][run.seed]
        scores = {"loss": loss, "accuracy": 1 - loss / 2}
        found[run.digest] = stored(whole(run, "accuracy", scores))
    return found


def test_costs_and_savings_are_paired_differences(grid: Experiment) -> None:
    """By hand. In peace the rule loses 0.03, 0.02, 0.04; under the attack it gains 0.30, 0.38, 0.22. Student's t of two
    degrees of freedom at 97.5 % is 4.3027."""
    found = {(p.row, p.peaceful, p.score): p for p in prices(Grid(grid, "mini", results(grid)))}
    for (peaceful, score), gaps in {
        (True, "loss"): (-0.03, -0.02, -0.04),
        (False, "loss"): (0.30, 0.38, 0.22),
        (False, "accuracy"): (0.15, 0.19, 0.11),
    }.items():
        price = found["slow", peaceful, score]
        half = 4.3027 * stdev(gaps) / 3**0.5
        assert price.better == pytest.approx(fmean(gaps)) and price.pairs == 3
        assert price.low == pytest.approx(fmean(gaps) - half, rel=1e-4)
        assert price.high == pytest.approx(fmean(gaps) + half, rel=1e-4)
    assert found["none", True, "loss"].better == 0 and found["none", False, "loss"].mean == pytest.approx(0.9)


def test_the_table_has_peace_first_and_says_what_it_is(grid: Experiment) -> None:
    columns, rows = price_rows(prices(Grid(grid, "mini", results(grid))), "loss")
    assert columns == ["", "none: cost", "flip: saved"]
    assert [row[0] for row in rows] == ["none", "slow"]
    assert rows[1][1].startswith("0.550 (+0.030, +0.005 to +0.055)"), "a cost is a loss: positive"
    assert rows[1][2].startswith("0.600 (+0.300, ")


def test_a_seed_that_the_reference_lacks_does_not_count_and_one_seed_has_no_interval(grid: Experiment) -> None:
    done = results(grid)
    for run in Grid(grid, "mini").runs:
        if run.cell == {"rule": "none", "attack": "flip"} and run.seed != 1:
            del done[run.digest]
    price = next(p for p in prices(Grid(grid, "mini", done)) if (p.row, p.peaceful, p.score) == ("slow", False, "loss"))
    assert price.pairs == 1 and price.low is None and price.better == pytest.approx(0.38)
    assert price.mean == pytest.approx(0.62), "of the same seed"


def test_a_row_on_clients_own_data_has_no_price(tmp_path: Path) -> None:
    """Each client on its own test part, the reference's server model on the common set: shown, and not subtracted."""
    (tmp_path / "own.toml").write_text(GRID.replace("count = 5", "count = 5\nown_test = 0.3"))
    own = load_experiment(tmp_path / "own.toml")
    done = results(own)
    for run in Grid(own, "mini").runs:
        if run.cell["rule"] == "slow":
            done[run.digest] = done[run.digest].model_copy(update={"target": "clients"})
    of = {price.row: price for price in prices(Grid(own, "mini", done)) if price.score == "loss" and price.peaceful}
    assert isnan(of["slow"].better) and of["slow"].low is None and of["none"].better == 0
    cell = price_rows([*of.values()], "loss")[1][1][1]
    assert cell.startswith("0.550 (") and "other data" in cell


def test_other_experiments_have_no_prices(tmp_path: Path) -> None:
    (tmp_path / "plain.toml").write_text(GRID.replace('peace = { axis = "attack", label = "none" }\n', ""))
    plain = load_experiment(tmp_path / "plain.toml")
    assert prices(Grid(plain, "mini", results(plain))) == []


@pytest.mark.parametrize(
    ("was", "now", "words"),
    [
        ('label = "none" }', 'label = "war" }', "no axis has"),
        ('axis = "attack"', 'axis = "rule"', "another axis"),
        ('reference = "none"\n', "", "beside a reference"),
    ],
)
def test_a_peace_that_is_none_is_refused(tmp_path: Path, was: str, now: str, words: str) -> None:
    (tmp_path / "bad.toml").write_text(GRID.replace(was, now, 1))
    with pytest.raises(ConfigError, match=words):
        load_experiment(tmp_path / "bad.toml")


def test_attacks_are_named_once(grid: Experiment) -> None:
    assert attacks_of([r.settings.model_dump() for r in results(grid).values()]) == ["sign-flip by 20% of the clients"]
    assert attacks_of([{"attack": {"kind": "none"}}, {}]) == []


def test_the_robustness_experiment_is_at_most_150_runs_and_every_rule_meets_every_attack() -> None:
    """Profiles share runs by their digests. 20 % of 15 clients are 3, and each cell has three seeds."""
    experiment = load_experiment(ROOT / "experiments" / "robustness.toml")
    runs = {name: Grid(experiment, name).runs for name in ("mini", "liars", "skew")}
    assert len({run.digest for planned in runs.values() for run in planned}) <= 150
    met = {(run.cell["rule"], run.cell["attack"]) for run in runs["mini"]}
    rules, attacks = ({pair[k] for pair in met} for k in (0, 1))
    assert len(met) == len(rules) * len(attacks) and "none" in rules and "none" in attacks
    kinds = {run.config.defence.rule for run in runs["mini"]}
    assert {"none", "clip", "geometric-median", "multi-krum", "centred-clipping"} <= kinds
    for planned in runs.values():
        assert {run.seed for run in planned} == {0, 1, 2}
        for run in planned:
            assert run.config.clients.count == 15 and run.config.server.weighting == "uniform"
    liars = [run.config.attack.share or 0 for run in runs["liars"]]
    assert {int(share * 15 + 1e-9) for share in liars} == {0, 1, 3, 5, 6}
    assert len({run.cell["skew"] for run in runs["skew"]}) == 3


def test_picture_and_table_of_experiments_say_that_they_are_under_attack(grid: Experiment, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from fedlora.experiments.dot_pictures import dots_figure

    places = Places(tmp_path / "results", tmp_path / "work", None)
    for found in results(grid).values():
        gather(places.results, "grid", found)
    dots = dots_figure(Grid(grid, "mini", places.finished()))
    assert dots is not None and "UNDER ATTACK, on purpose: some of these runs, by sign-flip" in dots.get_suptitle()
    said = invoke("experiment", "table", tmp_path / "grid.toml", "--results", places.results, "--work", places.work)
    assert "UNDER ATTACK, on purpose: sign-flip by 20%" in said.stdout + said.stderr
    assert "0.600 (+0.300, " in said.stdout
    value = invoke("experiment", "table", tmp_path / "grid.toml", "--results", places.results, "--json").stdout
    assert json.loads(value)["attacks"] and len(json.loads(value)["prices"]) == 8
