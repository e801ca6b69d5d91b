"""An experiment's file, and the runs that it plans. Kinds: by hand, contract."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedlora.errors import ConfigError
from fedlora.experiments.grid import Grid, as_text, from_text
from fedlora.experiments.spec import Experiment, load_experiment, names_in
from fedlora.methods import build

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
    assert {key: [*by_value] for key, by_value in grid.search.items()} == {
        ("FedIT",): [1e-3, 1e-2],
        ("GLoRA",): [1e-3, 1e-2],
    }
    assert len(grid.searches) == 4 and {(r.cell["split"], r.seed, r.stage) for r in grid.searches} == {
        ("skewed", 7, "search")
    }
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
    privacy = (
        '{ "privacy.clipping_norm" = 1.0, "privacy.epsilon" = 8.0, "privacy.delta" = 1e-2, "server.weighting" = '
        '"uniform" }'
    )
    text = FILE.replace('skewed = { "clients.dirichlet_alpha" = 0.5 }', f"skewed = {privacy}")
    text = text.replace("GLoRA = {", 'GLoRA = { "privacy" = {},').replace('"fedit"', '"ffa-lora"')
    runs = Grid(written(tmp_path, text), "one").runs({("FedIT",): 1.0, ("GLoRA",): 1.0})
    private = {run.cell["method"]: run.config.privacy for run in runs}
    assert private["GLoRA"] is None and private["FedIT"] is not None and "SIMULATED" in private["FedIT"].population
    with pytest.raises(ConfigError, match=r"privacy\.ledger"):
        grid = Grid(
            written(
                tmp_path, text.replace('"privacy.clipping_norm"', '"privacy.ledger" = "x", "privacy.clipping_norm"')
            ),
            "one",
        )
        grid.runs({("FedIT",): 1.0, ("GLoRA",): 1.0})


def test_a_part_of_a_grid_has_the_same_runs_and_the_whole_search(tmp_path: Path) -> None:
    experiment, chosen = written(tmp_path), {("FedIT",): 1e-3, ("GLoRA",): 1e-2}
    whole, part = Grid(experiment, "mini"), Grid(experiment, "mini", {"method": ["GLoRA"], "split": ["even"]}, [1])
    assert {run.digest for run in part.runs(chosen)} < {run.digest for run in whole.runs(chosen)}
    assert [run.cell for run in part.runs(chosen)] == [{"split": "even", "method": "GLoRA"}]
    assert {run.digest for run in part.searches} == {r.digest for r in whole.searches if r.cell["method"] == "GLoRA"}
    for wrong, said in (({"split": ["odd"]}, "no 'odd'"), ({"x": ["y"]}, "no axis 'x'")):
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
    odd = Grid(written(tmp_path, FILE.replace('method.name" = "fedit', 'method.nam" = "fedit')), "mini")
    assert all("method.nam" in why or "'nam'" in why for why in odd.faults().values()) and len(odd.faults()) == 2
    with pytest.raises(ConfigError, match="the number 'unseen, last'"):
        Grid(written(tmp_path, FILE.replace("rows =", 'metric = "unseen, last"\nrows =')), "mini").check_number()


WRONG: list[tuple[str, str, str]] = [
    ('over = ["method"]', 'over = ["methods"]', "'methods' is not an axis; there are split, method"),
    ('axes = { split = ["skewed"] }', 'axes = { split = ["odd"] }', "split has no label 'odd'"),
    ('title = "Tiny"', "titel = 3", "titel: Extra inputs"),
    ("[run.model]", "[run.model", "is not TOML"),
    ("seeds = [0, 1]", "seeds = []", "seeds: .*at least 1"),
    ("seeds = [0, 1]", "seeds = [0, 0]", "mini, seeds, names 0 twice"),
    ("values = [1e-3, 1e-2]", "values = [1e-3, 1e-3]", "values names 0.001 twice"),
    ('rows = "method"', 'rows = "methods"', "rows: 'methods' is not an axis"),
    ("seeds = [0, 1]", "seeds = [7, 1]", "seed 7 is both .*profile mini"),
    ('reference = "FedIT"', 'reference = "fedit"', "method has no label 'fedit'"),
    ('title = "Tiny"', 'title = "Tiny"\nskip = [{ split = "odd" }]', "skip: split has no label 'odd'"),
    ('title = "Tiny"', 'title = "Tiny"\nmetric = "test last"', "called 'test last'"),
    ("values = [1e-3, 1e-2]", 'key = "run.seed"\nvalues = [1, 2]', "tune.key = "),
    ('"train.max_steps" = 2', '"train.learning_rate" = 0.1', "profile mini sets train.learning_rate, and the search"),
    ('"train.max_steps" = 7', '"run.seed" = 3', "method = 'GLoRA' sets run.seed"),
    ("rounds = 4", "rounds = 4\nseed = 5", r"\[run\] sets run.seed"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "said"), WRONG)
def test_a_wrong_file_is_refused_with_the_key(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in FILE
    with pytest.raises(ConfigError, match=said):
        written(tmp_path, FILE.replace(old, new))


@pytest.mark.parametrize(
    "key", ["train.learning_rate.x", "model.gradient_checkpointing", "train.optimizer", "nothing.at_all"]
)
def test_a_search_is_over_a_number_that_there_is(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=key.split(".")[0]):
        _ = Grid(written(tmp_path, FILE.replace("[tune]", f'[tune]\nkey = "{key}"')), "mini").searches


# ---- the files of this repository --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names_in(ROOT / "experiments"))
def test_every_experiment_here_can_be_planned(name: str) -> None:
    """Each profile: no unknown key, and every configuration serves its clients. One is at the paper's scale."""
    experiment = load_experiment(ROOT / "experiments" / f"{name}.toml")
    assert "paper" in experiment.profiles
    for profile in experiment.profiles:
        grid = Grid(experiment, profile)
        assert grid.faults() == {}
        grid.check_number()


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_a_table_has_the_papers_row_and_says_what_it_chose(path: Path) -> None:
    """All that the paper leaves open, and what differs from its text, is named in the note."""
    experiment = load_experiment(path)
    configs = [run.config for run in planned(experiment)]
    literal = {run.config.method.build() for run in planned(experiment) if "GLoRA (paper)" in run.cell.values()}
    assert literal == {build("glora-paper")}
    note = experiment.profile("paper").note
    for word in ("alpha = 2 r", "dropout", "held out" if path.stem != "table3" else "holds out", "constant rate", "TF32"
                 if path.stem != "table4" else "bfloat16", "three seeds", "glora-paper", "begins anew"):  # fmt: skip
        assert word in note, word
    for config in configs if path.stem != "table3" else ():
        assert len(config.model.revision or "") == len(config.data.revision or "") == 40
    assert len(TABLES) == 6


def test_the_tasks_of_table_3_are_the_same_for_each_seed_and_for_the_search() -> None:
    """Drawn once, in two files beside the table, whose content is part of what a run is."""
    experiment = load_experiment(ROOT / "experiments" / "table3.toml")
    runs = [*Grid(experiment, "paper").searches, *planned(experiment)]
    lists = {tuple(run.config.data.task_lists) for run in runs}
    assert len({run.config.run.seed for run in runs}) == 4 and len(lists) == 1
    clients, unseen = (Path(place).read_text().split() for place in lists.pop())
    assert (len(set(clients)), len(set(unseen)), {*clients} & {*unseen}) == (50, 20, set())


def planned(experiment: Experiment) -> Any:
    """The runs of the paper's profile, at the largest value."""
    grid = Grid(experiment, "paper")
    return grid.runs({grid.key(cell): grid.values[-1] if grid.values else None for cell in grid.cells})


def test_the_lines_of_a_file_name_a_profile_that_it_has(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no profile 'big'; it has mini, one"):
        Grid(written(tmp_path), "big")
    assert json.loads(as_text(Grid(written(tmp_path), "mini").searches[0]))["experiment"] == "tiny"
