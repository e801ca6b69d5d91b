"""A grid of real runs of a tiny model: the same bits whoever makes them and whatever dies. Kind: end-to-end."""

from __future__ import annotations

import json
import math
import os
import stat
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

import fedlora
import fedlora.runs.preparation
from fedlora.errors import ConfigError, QuorumNotMet
from fedlora.experiments import cost, results
from fedlora.experiments.clusters import Asked, forget, slurm
from fedlora.experiments.drive import Store, drive
from fedlora.experiments.grid import Grid
from fedlora.experiments.here import KILLED, dealt, here, worker_count
from fedlora.experiments.spec import load_experiment
from fedlora.experiments.work import Work
from fedlora.workers.processes import available, one_process
from support.benchmark_files import write_glue
from support.command_line import Said, invoke
from support.grids import GRID, outcomes, write_grid
from support.processes import begun, command_line, lines_in, wait_for

PRIVATE = (
    '"server.weighting" = "uniform", "privacy.clipping_norm" = 1.0, "privacy.epsilon" = 8.0, "privacy.delta" = 1e-2'
)
SHORT = GRID.replace("rounds = 150", "rounds = 6")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """two.toml with its data and model, and its six runs, made here one after the other: `alone`, `calm`."""
    folder = tmp_path_factory.mktemp("grid")
    write_grid(folder, SHORT)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        invoke("experiment", "run", "two.toml", "--results", "alone", "--work-dir", "calm")
    return folder


@pytest.fixture
def grid(world: Path) -> Grid:
    return Grid(load_experiment(world / "two.toml"), "mini")


def quiet(todo: Any, one: Any) -> None:
    """Nobody watches."""


def of_one(store: Store) -> Callable[[Any], Any]:
    return lambda runs: here(runs, store.work)


def test_a_line_is_what_the_runs_own_files_say(world: Path, grid: Grid) -> None:
    lines = results.read(world / "alone" / "two.jsonl")
    assert len(lines) == 6 and list(lines) == sorted(lines)
    for digest, line in lines.items():
        folder = world / "calm" / "runs" / digest
        summary = json.loads((folder / "summary.json").read_text())
        rounds = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
        assert line["test"] == summary["test"] and line["bytes"] == summary["bytes"]
        assert line["history"]["evaluated"] == [one["round"] for one in rounds] == [1, 2, 3, 4, 5, 6]
        assert line["history"]["scores"]["loss"] == [one["metrics"]["loss"] for one in rounds]
        assert line["history"]["losses"]["site-1"] == [one["losses"]["site-1"] for one in rounds]
        assert line["config"]["model"]["name"] == "model", "no path of this machine"
    searched = [line for line in lines.values() if line["stage"] == "search"]
    assert {line["seed"] for line in searched} == {7} and len(searched) == 4


def test_two_workers_make_the_same_bits_though_they_are_killed(
    world: Path, tmp_path: Path, grid: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 on both in the middle of a run: others take it up. Forked here, since a server of forks would import
    torch anew (tests/workers has it)."""
    monkeypatch.setattr("fedlora.experiments.here._IMPORTED", None)
    monkeypatch.setattr("fedlora.experiments.here.LOOK", 0.02)
    store = Store(tmp_path / "results" / "two.jsonl", Work(tmp_path / "work"))
    before, killed = psutil.Process().children(), []

    def watch(todo: Any, one: Any) -> None:
        if not killed and any(0 < lines_in(store.work.run_folder(run).path) < 5 for run in todo):
            killed.extend(child for child in psutil.Process().children() if child not in before)
            for child in killed:
                child.kill()

    with store.held():
        assert drive(grid, store, lambda runs: here(runs, store.work, 2), watch) == {} and len(killed) == 2
    assert outcomes(tmp_path / "results", tmp_path / "work") == outcomes(world / "alone", world / "calm")


def test_a_killed_driver_is_called_again_and_ends_with_the_same_bits(
    world: Path, tmp_path: Path, grid: Grid, forked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a run, with a line half written. A second driver beside it is refused."""
    monkeypatch.chdir(world)
    store = Store(tmp_path / "results" / "two.jsonl", Work(tmp_path / "work"))
    words = [
        "experiment",
        "run",
        "two.toml",
        "--results",
        str(tmp_path / "results"),
        "--work-dir",
        str(tmp_path / "work"),
    ]
    child = begun(forked, command_line, words, str(tmp_path / "log.txt"))
    wait_for(child, lambda: any(lines_in(folder) > 1 for folder in tmp_path.glob("work/runs/*")))
    with pytest.raises(ConfigError, match="another process drives two"), store.held():
        pass
    child.kill()
    child.join()
    (tmp_path / "results").mkdir(exist_ok=True)
    with (tmp_path / "results" / "two.jsonl").open("a") as file:
        file.write('{"digest": "0')
    with store.held():
        assert drive(grid, store, of_one(store), quiet) == {}
    assert outcomes(tmp_path / "results", tmp_path / "work") == outcomes(world / "alone", world / "calm")


def test_a_failure_is_kept_apart_and_tried_again(
    world: Path, tmp_path: Path, grid: Grid, monkeypatch: pytest.MonkeyPatch, main: Callable[..., Said]
) -> None:
    """A full disk says nothing of a run: the next call does it, and until then the search waits. A run that diverged
    has a line of its own, which the search takes for the worst; --force forgets it."""
    real, store = fedlora.runs.preparation.prepare, Store(tmp_path / "results" / "two.jsonl", Work(tmp_path / "work"))

    def prepare(config: Any, *rest: Any) -> Any:
        if config.run.seed == 7 and config.train.learning_rate == 1e-2:
            raise QuorumNotMet("no upload is left") if config.method.name == "fedit" else OSError(28, "No space left")
        return real(config, *rest)

    with monkeypatch.context() as patched:
        patched.setattr("fedlora.runs.preparation.prepare", prepare)
        with store.held():
            failed = drive(grid, store, of_one(store), quiet)
    assert sorted(failed.values()) == ["OSError: [Errno 28] No space left", "no upload is left"]
    progress = store.progress(grid)
    assert {over: choice.value for over, choice in progress.choices.items()} == {("FedIT",): 1e-3}
    assert len(progress.used) == 1 and len(progress.missing("search")) == 1
    places = ("--results", tmp_path / "results", "--work-dir", tmp_path / "work")
    monkeypatch.chdir(world)
    said = invoke("experiment", "status", "two.toml", *places)
    assert "No space left" in said.stderr and "3 of 4" in said.stdout
    invoke("experiment", "run", "two.toml", *places)
    assert not store.progress(grid).missing("search")
    assert main("experiment", "run", "two.toml", *places, "--force").code == 0
    after = outcomes(tmp_path / "results", tmp_path / "work")
    calm = outcomes(world / "alone", world / "calm")
    assert {digest: after[digest] for digest in calm} == calm


def test_a_file_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    """The run is planned under the digest of what was there; it would read what is there now."""
    write_grid(tmp_path, SHORT)
    grid = Grid(load_experiment(tmp_path / "two.toml"), "mini")
    run, work = grid.searches[0], Work(tmp_path / "work")
    (tmp_path / "mine.jsonl").write_text((tmp_path / "mine.jsonl").read_text() * 2)
    assert "changed after" in (work(run) or "")
    assert work.line(run) is None and not work.run_folder(run).exists()


def test_what_a_grid_costs_is_counted_before_it_runs(world: Path, grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: 4 runs of the search and 2 that wait for it, shown at the largest value; 6 rounds, 2 clients, a step of
    4 examples. In a run of epochs only the data can count. Bytes from two trial rounds are those of whole runs."""
    todo = cost.to_do(Store(world / "nothing" / "two.jsonl", Work(world / "none")).progress(grid))
    assert len(todo) == 6 and {run.value for run in todo if run.stage == "run"} == {1e-2}
    config = todo[0].config
    assert cost.examples(config) == 6 * 2 * 1 * 4
    assert cost.examples(config.model_copy(update={"train": config.train.model_copy(update={"max_steps": -1})})) is None
    evaluate = config.evaluate.model_copy(update={"every": 4})
    hours = cost.Trial(1.0, 2.0, 3.0, 0.0, 0.0).hours(config.model_copy(update={"evaluate": evaluate}))
    assert hours * 3600 == pytest.approx(1 + 6 * 2 + 2 * 3)
    monkeypatch.setattr(cost, "one_process", lambda *given, server: one_process(*given))  # which need not import torch
    trial = cost.tried(todo[:1], None, lambda run: None)[todo[0].digest]
    assert isinstance(trial, cost.Trial) and trial.round > 0 and 0.05 < trial.memory < 50
    whole = results.read(world / "alone" / "two.jsonl")[todo[0].digest]["bytes"]["total"]
    assert 6 * trial.megabytes * 1e6 == pytest.approx(whole)


def test_private_runs_are_simulations_that_tell_no_traffic_and_no_data(world: Path, tmp_path: Path) -> None:
    """Each has a ledger in its folder alone; its results stand beside those without privacy."""
    text = SHORT.replace('train = "mine.jsonl"', 'task = "sst2"\nvalidation = 0.2').replace("rounds = 6", "rounds = 2")
    text = text.replace("GLoRA = {", "private = {").replace('"glora"', f'"ffa-lora", {PRIVATE}')
    (tmp_path / "two.toml").write_text(
        text.replace('"model"', f'"{world / "model"}"').replace("values = [1e-3, 1e-2]", "values = [1e-3]")
    )
    write_glue(tmp_path / "root", "sst2")
    grid = Grid(load_experiment(tmp_path / "two.toml"), "mini")
    store = Store(tmp_path / "results" / "two.jsonl", Work(tmp_path / "work", tmp_path / "root"))
    with store.held():
        assert drive(grid, store, of_one(store), quiet) == {}
    (run, line) = next(one for one in store.progress(grid).used if one[0].cell["method"] == "private")
    assert line["privacy"]["epsilon_planned"] <= 8 and line["read"]["data"] is None and not line["bytes"]
    assert [path.name for path in tmp_path.rglob("*ledger*")] == ["simulated-ledger.jsonl"]
    assert store.work.run_folder(run).path in next(tmp_path.rglob("*ledger*")).parents
    row = fedlora.results(store.results).set_index("method").loc["private"]
    assert row["epsilon"] <= 8 and math.isnan(row["MB up"]) and math.isnan(row["seconds"])


def test_gpus_are_dealt_to_workers(grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: dealt as cards are, or one that is shared; nothing to runs for the CPU."""
    monkeypatch.setattr("fedlora.experiments.here.torch.cuda.device_count", lambda: 4)
    runs = grid.searches
    assert dealt(2, runs) == ["0,2", "1,3"] and dealt(5, runs) == ["0", "1", "2", "3", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7,8,9")
    assert dealt(3, runs) == ["5,9", "7", "8"] and worker_count("auto", runs) == 4
    on_cpu = Grid(
        grid.experiment.model_copy(update={"run": {**grid.experiment.run, "model": {"name": "demo", "device": "cpu"}}}),
        "mini",
    )
    assert dealt(2, on_cpu.searches) == ["", ""]
    assert worker_count("auto", on_cpu.searches) == min(4, available())


# ---- Slurm, played by two programs -------------------------------------------------------------------------------

SBATCH = """#!{python}
import pathlib, sys
place = pathlib.Path(__file__).parent
number = len([*place.glob("script-*")]) + 1
(place / f"script-{{number}}").write_text(sys.stdin.read())
print(number)
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`sbatch` keeps the scripts and runs nothing; `squeue` says what is in the file `queue`."""
    place = tmp_path / "bin"
    place.mkdir()
    for name, text in (
        ("sbatch", SBATCH.format(python=sys.executable)),
        ("squeue", "#!/bin/sh\n[ ! -e {0} ] || cat {0}\n".format(place / "queue")),
    ):
        (place / name).write_text(text)
        (place / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{place}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("fedlora.experiments.clusters._LOOK", 0.0)
    return place


def test_a_task_that_is_gone_twice_has_failed_and_one_in_the_queue_is_waited_for(
    world: Path, tmp_path: Path, cluster: Path, monkeypatch: pytest.MonkeyPatch, main: Callable[..., Said]
) -> None:
    """Two arrays, which ask for what was asked, and no third one until --force. (Real tasks: tests/clusters.)"""
    monkeypatch.chdir(world)
    asked = ("--time", "04:00:00", "--gpus", "1", "--option", "--mem=16G")
    words = ("experiment", "tune", "two.toml", "--backend", "slurm", *asked, "--results", tmp_path / "results")
    words = (*words, "--work-dir", tmp_path / "work")
    for _ in range(2):
        assert main(*words).code == 1
        assert len(list(cluster.glob("script-*"))) == 2
    assert KILLED in (said := main(*words).err) and "--force" in said
    script = (cluster / "script-1").read_text()
    for word in ("--array=0-3 ", "--time=04:00:00", "--gpus-per-task=1", "--mem=16G", "--requeue"):
        assert word in script, word
    assert main(*words, "--force").code == 1 and len(list(cluster.glob("script-*"))) == 4, "two new tries"
    grid, work = Grid(load_experiment(Path("two.toml")), "mini"), Work(tmp_path / "work")
    arrays = {*(work.folder / "slurm").glob("*.json")}
    living = max(arrays)
    (cluster / "queue").write_text(f"{living.stem}|7_1\nanother-job|8\n")
    forget(work, grid.name)
    monkeypatch.setattr("fedlora.experiments.clusters._LOOK", 60.0)
    with closing(slurm(grid.searches, work, grid.name, Asked("10"))) as ended:
        assert next(ended) is None, "it waits"
    (new,) = {*(work.folder / "slurm").glob("*.json")} - {living}
    assert new not in arrays and len(json.loads(new.read_text())["digests"]) == 3, "the fourth is in the queue"
