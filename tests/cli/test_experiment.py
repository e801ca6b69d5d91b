"""`fedlora experiment`: its commands on a grid of real runs of a tiny model. Kind: end-to-end, contract."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fedlora.experiments.results import read
from support.command_line import Said, drawing, invoke
from support.grids import GRID, write_grid

SHORT = GRID.replace("rounds = 150", "rounds = 2").replace("seeds = [0]", "seeds = [0, 1]")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two.toml, its data and its model; commands are called there."""
    write_grid(tmp_path, SHORT.replace("[tune]", 'same = { "method.name" = "glora" }\n[tune]'))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_grid_is_planned_searched_run_shown_and_drawn(place: Path) -> None:
    """A label of the same configuration as another is not run twice, and has the same numbers."""
    plan = invoke("experiment", "run", "two.toml", "--plan").stdout
    assert [cell.strip() for cell in plan.splitlines()[-2].split("│")][1:7] == ["two", "4", "6", "0", "10", "160"]
    assert not (place / "runs").exists() and not (place / "results").exists(), "nothing is written"
    said = invoke("experiment", "tune", "two.toml")
    assert {line["stage"] for line in read(place / "results" / "two.jsonl").values()} == {"search"}
    assert "GLoRA: train.learning_rate = " in said.stderr
    invoke("experiment", "run", "two.toml", "--filter", "method=FedIT")
    status = invoke("experiment", "status", "two.toml", "--json").stdout
    assert json.loads(status)["two"] == {"search": [4, 4], "runs": [2, 6], "failed": 0, "to_do": 4}
    invoke("experiment", "run", "two.toml")
    assert len(read(place / "results" / "two.jsonl")) == 4 + 4
    scores, *_ = json.loads(invoke("experiment", "table", "two.toml", "--format", "json").stdout)["tables"]
    found = {row["method"]: row["mean"] for row in scores["rows"]}
    assert list(found) == ["FedIT", "GLoRA", "same"] and found["GLoRA"] == found["same"]
    with drawing():
        invoke("experiment", "plot", "two.toml")
    assert (place / "results" / "plots" / "two-mini.png").stat().st_size > 5000


def test_a_table_of_what_is_not_whole_has_another_exit_code(place: Path, main: Callable[..., Said]) -> None:
    said = main("experiment", "table", "two.toml")
    assert said.code == 1 and "0 of 6" in said.out
    assert "0 of 6" in main("experiment", "table", "two.toml", "--format", "csv").err
    (place / "mine.png").write_bytes(b"of a paper")
    assert main("experiment", "plot", "two.toml", "--out", "mine.png").code == 1
    assert (place / "mine.png").read_bytes() == b"of a paper"


def test_what_cannot_be_done_is_one_line(place: Path, main: Callable[..., Said]) -> None:
    for words, says in (
        (("run", "three.toml"), "there is no experiment three.toml"),
        (("run", "two.toml", "--profile", "paper"), "it has mini"),
        (("run", "two.toml", "--seeds", "7"), "7 is not a seed"),
        (("run", "two.toml", "--filter", "method=svd"), "no 'svd'"),
        (("run", "two.toml", "--backend", "slurm"), "--time"),
        (("run", "two.toml", "--time", "10"), "--time is for --backend slurm"),
        (("run", "two.toml", "--backend", "ray", "--workers", "2"), "--workers is for --backend here"),
        (("run", "two.toml", "--backend", "slurm", "--time", "10", "--option", "partition=x"), "--partition=gpu"),
        (("tune", "two.toml", "--seeds", "0"), "--seeds is of"),
        (("table", "two.toml", "--metric", "nonsense"), "'nonsense'; there are: test, best"),
    ):
        assert says in main("experiment", *words).error()
    assert not (place / "results" / "two.jsonl").exists()


def test_faults_of_all_cells_are_told_before_anything_runs(place: Path, main: Callable[..., Said]) -> None:
    text = (place / "two.toml").read_text()
    (place / "two.toml").write_text(
        text.replace('"fedit"', '"fedit", "train.stepz" = 1').replace("ranks = [2]", "ranks = [2, 4]")
    )
    said = main("experiment", "run", "two.toml")
    assert said.code == 2 and "'train.stepz'" in said.err and not (place / "runs").exists()
