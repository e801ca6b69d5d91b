"""Grids under attack: the plan of the robustness experiment, and what pictures and tables say. Kind: structural."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedlora.experiments.grid import Grid
from fedlora.experiments.places import Places
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
    value = invoke("experiment", "table", tmp_path / "grid.toml", "--results", places.results, "--json").stdout
    assert json.loads(value)["attacks"]
