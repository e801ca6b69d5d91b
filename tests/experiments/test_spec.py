"""An experiment's file, and the runs that it plans. Kinds: by hand, contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedlora.errors import ConfigError
from fedlora.experiments.grid import Grid, as_text, from_text
from fedlora.experiments.spec import Experiment, comparison, load_experiment, names_in
from fedlora.methods import build
from fedlora.runs.config import parse_config

ROOT = Path(__file__).parents[2]
TABLES = sorted((ROOT / "experiments").glob("table*.toml"))
FILE = """
title = "Tiny"
rows = "method"
reference = "FedIT"
[run.model]
name = "demo"
[run.data]
train = "demo"
[run.clients]
count = 2
ranks = [2]
[run.run]
rounds = 4
[axes.split]
skewed = { "clients.dirichlet_alpha" = 0.5 }
even = { "clients.partition" = "iid", "train.max_steps" = 3 }
[axes.method]
FedIT = { "method.name" = "fedit" }
GLoRA = { "method.name" = "glora", "train.max_steps" = 7 }
[tune]
values = [1e-3, 1e-2]
over = ["method"]
at = { split = "skewed" }
seeds = [7]
[profiles.mini]
seeds = [0, 1]
set = { "train.max_steps" = 2 }
[profiles.one]
seeds = [0]
tune = [1e-2]
axes = { split = ["skewed"] }
"""


def written(folder: Path, text: str = FILE) -> Experiment:
    (folder / "tiny.toml").write_text(text)
    return load_experiment(folder / "tiny.toml")


def test_a_plan_is_the_product_of_its_axes_and_seeds_and_a_search_is_apart(tmp_path: Path) -> None:
    """By hand: 2 methods x 2 values on one split and one seed; then 2 splits x 2 methods x 2 seeds, each with the value
    of its method."""
    grid = Grid(written(tmp_path), "mini")
    assert {key: [*values] for key, values in grid.search.items()} == {
        (method,): [1e-3, 1e-2] for method in ("FedIT", "GLoRA")
    }
    assert [(run.cell["split"], run.seed, run.stage) for run in grid.searches] == [("skewed", 7, "search")] * 4
    assert grid.runs({}) == []
    runs = grid.runs({("FedIT",): 1e-3, ("GLoRA",): 1e-2})
    assert len({run.digest for run in runs}) == 8 and [run.seed for run in runs] == [0, 1] * 4
    assert {(run.cell["method"], run.config.train.learning_rate) for run in runs} == {("FedIT", 1e-3), ("GLoRA", 1e-2)}
    assert all(run.config.run.seed == run.seed for run in runs)
    one = Grid(written(tmp_path), "one")
    assert one.searches == [] and [run.config.train.learning_rate for run in one.runs({("FedIT",): 1e-2})] == [1e-2]


def test_the_later_wins_and_a_run_has_one_thread_unless_it_says_more(tmp_path: Path) -> None:
    """[run] < the profile's set < the axes in their order: the method's steps beat the split's."""
    grid = Grid(written(tmp_path), "mini")
    steps = {
        tuple(run.cell.values()): run.config.train.max_steps for run in grid.runs({("FedIT",): 1.0, ("GLoRA",): 1.0})
    }
    assert steps == {("skewed", "FedIT"): 2, ("skewed", "GLoRA"): 7, ("even", "FedIT"): 3, ("even", "GLoRA"): 7}
    assert {run.config.run.threads for run in grid.searches} == {1}
    more = Grid(written(tmp_path, FILE.replace("rounds = 4", "rounds = 4\nthreads = 3")), "mini")
    assert {run.config.run.threads for run in more.searches} == {3}


def test_an_empty_table_takes_a_table_away_and_private_clients_are_simulated(tmp_path: Path) -> None:
    keys = '"privacy.clipping_norm" = 1.0, "privacy.epsilon" = 8.0, "privacy.delta" = 1e-2'
    privacy = f'{{ {keys}, "server.weighting" = "uniform" }}'
    text = FILE.replace('skewed = { "clients.dirichlet_alpha" = 0.5 }', f"skewed = {privacy}")
    text = text.replace("GLoRA = {", 'GLoRA = { "privacy" = {},').replace('"fedit"', '"ffa-lora"')
    runs = Grid(written(tmp_path, text), "one").runs({("FedIT",): 1.0, ("GLoRA",): 1.0})
    private = {run.cell["method"]: run.config.privacy for run in runs}
    assert private["GLoRA"] is None and private["FedIT"] is not None and "SIMULATED" in private["FedIT"].population
    for old, new, said in (
        ('"demo"\n[run.clients', '"my.csv"\n[run.clients', "data of one's own"),
        ('"privacy.epsilon"', '"privacy.ledger" = "x", "privacy.epsilon"', r"privacy\.ledger"),
    ):
        with pytest.raises(ConfigError, match=said):
            Grid(written(tmp_path, text.replace(old, new)), "one").runs({("FedIT",): 1.0})


def test_a_part_of_a_grid_has_the_same_runs_and_the_whole_search(tmp_path: Path) -> None:
    experiment, chosen = written(tmp_path), {("FedIT",): 1e-3, ("GLoRA",): 1e-2}
    whole, part = Grid(experiment, "mini"), Grid(experiment, "mini", {"method": ["GLoRA"], "split": ["even"]}, [1])
    assert {run.digest for run in part.runs(chosen)} < {run.digest for run in whole.runs(chosen)}
    assert [run.cell for run in part.runs(chosen)] == [{"split": "even", "method": "GLoRA"}]
    assert {run.digest for run in part.searches} == {r.digest for r in whole.searches if r.cell["method"] == "GLoRA"}
    for wrong, said in (({"split": ["odd"]}, "no 'odd'"), ({"x": ["y"]}, "axes split, method")):
        with pytest.raises(ConfigError, match=said):
            Grid(experiment, "mini", wrong)
    with pytest.raises(ConfigError, match="9 is not a seed"):
        Grid(experiment, "mini", {}, [9])


def test_a_run_is_known_by_its_configuration_and_the_content_of_its_files(tmp_path: Path) -> None:
    """Not by the experiment's words, nor where its files are; and it travels as text."""
    (tmp_path / "mine.jsonl").write_text('{"text": "a", "label": "x"}\n')
    text = FILE.replace('train = "demo"', 'train = "mine.jsonl"')
    run = Grid(written(tmp_path, text), "mini").searches[0]
    assert from_text(as_text(run)) == run
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mine.jsonl").rename(tmp_path / "elsewhere" / "mine.jsonl")
    moved = written(tmp_path / "elsewhere", text.replace("Tiny", "Other"))
    assert Grid(moved, "mini").searches[0].digest == run.digest
    (tmp_path / "elsewhere" / "mine.jsonl").write_text('{"text": "b", "label": "x"}\n')
    assert Grid(moved, "mini").searches[0].digest != run.digest


def test_a_configuration_is_tried_on_a_toy_before_anything_runs(tmp_path: Path) -> None:
    """FedIT needs one rank: only handing a download to a client of another shows it."""
    grid = Grid(written(tmp_path, FILE.replace("ranks = [2]", "ranks = [2, 4]")), "mini")
    assert set(grid.faults()) == {("skewed", "FedIT"), ("even", "FedIT")}
    text = FILE.replace('"clients.dirichlet_alpha" = 0.5', '"clients.dirichlet_alpha" = -1.0')
    text = text.replace("seeds = [0, 1]", 'seeds = [0, 1]\naxes = { split = ["even"] }')
    assert len(Grid(written(tmp_path, text), "mini").faults()) == 2, "the search is at a split that no run has"
    odd = Grid(written(tmp_path, FILE.replace('method.name" = "fedit', 'method.nam" = "fedit')), "mini")
    assert all("method.nam" in why or "'nam'" in why for why in odd.faults().values()) and len(odd.faults()) == 2


def test_a_comparison_is_by_the_best_round_of_the_test_set_as_far_as_there_is_one() -> None:
    def metric(**data: float) -> str:
        raw = {"model": {"name": "demo"}, "data": {"train": "demo", **data}, "clients": {"count": 2, "ranks": [2]}}
        base = parse_config(raw)
        return comparison(base, {base.method.name: base.method}, [0], name="x").metric

    assert [metric(), metric(validation=0), metric(test=0)] == ["test, best", "test, last", "validation, best"]
    with pytest.raises(ConfigError, match=r"data\.validation = 0"):
        metric(validation=0, test=0)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('over = ["method"]', 'over = ["methods"]', "'methods' is not an axis; there are split, method"),
        ('title = "Tiny"', "titel = 3", "titel: Extra inputs"),
        ("seeds = [0, 1]", "seeds = [0, 0]", "profiles.mini.seeds: names 0 twice"),
        ("seeds = [0, 1]", "seeds = [7, 1]", "seed 7 is both .*profile mini"),
        ('reference = "FedIT"', 'reference = "fedit"', "method has no label 'fedit'"),
        ('"train.max_steps" = 2', '"train.learning_rate" = 0.1', "profile mini sets train.learning_rate, and"),
        ("rounds = 4", "rounds = 4\nseed = 5", r"\[run\] sets run.seed"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_with_the_key(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in FILE
    with pytest.raises(ConfigError, match=said):
        written(tmp_path, FILE.replace(old, new))


def test_a_search_is_over_a_number_that_there_is_and_a_whole_one_stays_one(tmp_path: Path) -> None:
    """TOML's list is of numbers; svd takes a rank of 4, not of 4.0."""
    with pytest.raises(ConfigError, match="nothing"):
        _ = Grid(written(tmp_path, FILE.replace("[tune]", '[tune]\nkey = "nothing.at_all"')), "mini").searches
    text = FILE.replace('"fedit"', '"svd"').replace('"glora"', '"svd"').replace("[1e-3, 1e-2]", "[2, 4]")
    runs = Grid(written(tmp_path, text.replace("[tune]", '[tune]\nkey = "method.rank"')), "mini").searches
    assert [repr(run.config.method.build()) for run in runs[:2]] == [repr(build("svd", rank=rank)) for rank in (2, 4)]


# ---- the files of this repository --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names_in(ROOT / "experiments"))
def test_every_experiment_here_can_be_planned(name: str) -> None:
    """Each profile: no unknown key, and every configuration serves its clients. One is at the paper's scale."""
    experiment = load_experiment(ROOT / "experiments" / f"{name}.toml")
    assert "paper" in experiment.profiles
    for profile in experiment.profiles:
        assert Grid(experiment, profile).faults() == {}


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_a_table_has_the_papers_row(path: Path) -> None:
    """And its model and data are pinned."""
    experiment = load_experiment(path)
    configs = [run.config for run in planned(experiment)]
    literal = {run.config.method.build() for run in planned(experiment) if "GLoRA (paper)" in run.cell.values()}
    assert literal == {build("glora-paper")}
    for config in configs if path.stem != "table3" else ():
        assert len(config.model.revision or "") == 40
    assert len(TABLES) == 6


def planned(experiment: Experiment) -> Any:
    """The runs of the paper's profile, at the largest value."""
    grid = Grid(experiment, "paper")
    return grid.runs({grid.key(cell): grid.values[-1] if grid.values else None for cell in grid.cells})
