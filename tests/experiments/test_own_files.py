"""Experiments on files of one's own: paths start at the experiment's file, results are known by what is in the files,
and a value of a search that fails is the worst. Kinds: contract, end-to-end on tiny models."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedlora.runs.preparation
from fedlora.errors import CheckpointError, ConfigError
from fedlora.experiments.grid import Grid
from fedlora.experiments.places import Places, by_machine
from fedlora.experiments.runner import run_all
from fedlora.experiments.spec import Experiment, load_experiment
from fedlora.experiments.store import read_results
from support.command_line import Said, invoke
from support.known_warnings import FUTURE_NAMES, NOT_ON_THE_HUB
from support.training_data import classification, rows, save_encoder

pytestmark = [FUTURE_NAMES, NOT_ON_THE_HUB]
ROOT = Path(__file__).parents[2]
MINE = """
title = "Mine"
question = "?"
reference = "FedIT"
[run.model]
path = "model"
dropout = 0.0
[run.data]
train = "mine.jsonl"
max_length = 16
[run.clients]
count = 2
ranks = [2]
partition = "iid"
[run.train]
steps = 1
batch_size = 4
[run.run]
rounds = 1
threads = 1
[axes.method]
FedIT = { "method.name" = "fedit" }
[profiles.mini]
seeds = [0]
"""
TUNE = """
[tune]
values = [1e-3, 1e-2, 1e30]
seeds = [7]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def bench(tmp_path: Path, model: Path) -> Callable[..., Path]:
    """Makes a folder with an experiment `mine.toml` and the files that it names."""

    def make(name: str, seed: int = 0, text: str = MINE) -> Path:
        folder = tmp_path / name
        shutil.copytree(model, folder / "model")
        (folder / "mine.jsonl").write_text(rows(classification(60, seed)))
        (folder / "mine.toml").write_text(text)
        return folder

    return make


def loaded(folder: Path) -> Experiment:
    return load_experiment(folder / "mine.toml")


def where(root: Path) -> list[str]:
    return ["--results", str(root / "results"), "--work", str(root / "work")]


def kept(root: Path) -> dict[str, Any]:
    """Digest -> result."""
    return read_results(root / "results")


def test_two_data_sets_of_one_name_in_two_folders_are_two(
    bench: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same file in two folders, of other sentences; asked from a third folder. One result each, of its own data."""
    one, two = bench("one", seed=0), bench("two", seed=1)
    monkeypatch.chdir(tmp_path)
    for folder in (one, two):
        invoke("experiment", "run", folder / "mine.toml", *where(tmp_path))
    found = kept(tmp_path)
    assert len(found) == 2 and len({r.data["train"] for r in found.values()}) == 2
    for folder in (one, two):
        (run,) = Grid(loaded(folder), "mini").runs
        assert found[run.digest].files == dict(run.files) and set(run.files) == {"data.train", "model.path"}
        assert str(tmp_path) not in found[run.digest].model_dump_json(), "a result says nothing of where it was made"


def test_a_moved_folder_finds_its_results_and_a_changed_file_does_not(
    bench: Callable[..., Path], tmp_path: Path, main: Callable[..., Said]
) -> None:
    """Both contents are named; an interrupted run's folder is found by the same digest."""
    old = bench("old")
    invoke("experiment", "run", old / "mine.toml", *where(tmp_path))
    (run,) = Grid(loaded(old), "mini").runs
    new = old.rename(tmp_path / "new")
    (new / "mine.jsonl").rename(new / "renamed.jsonl")
    (new / "mine.toml").write_text(MINE.replace("mine.jsonl", "renamed.jsonl"))
    assert [r.digest for r in Grid(loaded(new), "mini").runs] == [run.digest], "neither place nor name counts"
    assert Places(tmp_path / "results", tmp_path / "work", None).grid(loaded(new), "mini").missing == []
    (new / "mine.toml").write_text(MINE)
    (new / "mine.jsonl").write_text(rows(classification(60, 5)))
    (changed,) = Grid(loaded(new), "mini").runs
    said = main("experiment", "status", new / "mine.toml", *where(tmp_path)).err.replace("\n", " ")
    assert f"with SHA-256 {run.files['data.train'][:12]}, and {new / 'mine.jsonl'} has" in said
    assert changed.files["data.train"][:12] in said and "1 finished run " in said
    table = json.loads(invoke("experiment", "table", new / "mine.toml", "--json", *where(tmp_path), code=1).stdout)
    assert table["cells"][0]["scores"] == {} and "0 of 1 " in table["missing"][0]


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/ask.jinja", "vocab.txt"]
)
def test_a_model_with_other_words_for_its_tokens_is_another(name: str, bench: Callable[..., Path]) -> None:
    """Whatever file transformers reads may change what a run trains on: a result of the old file is not taken."""
    folder = bench("one")
    file = folder / "model" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("{}")
    (before,) = Grid(loaded(folder), "mini").runs
    file.write_text("{ }")
    (after,) = Grid(loaded(folder), "mini").runs
    assert before.digest != after.digest and before.files["data.train"] == after.files["data.train"]


def test_another_model_of_the_same_name_is_another_run(bench: Callable[..., Path]) -> None:
    one, two = bench("one"), bench("two")
    config = json.loads((two / "model" / "config.json").read_text())
    (two / "model" / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    digests = {Grid(loaded(folder), "mini").runs[0].digest for folder in (one, two)}
    assert len(digests) == 2


def test_what_is_not_there_is_said_before_anything_runs(
    bench: Callable[..., Path], tmp_path: Path, main: Callable[..., Said]
) -> None:
    folder = bench("one")
    (folder / "mine.jsonl").unlink()
    said = main("experiment", "run", folder / "mine.toml", *where(tmp_path)).complaint()
    assert f"data.train: {folder / 'mine.jsonl'} does not exist" in said
    assert "the experiment's file" in said and not (tmp_path / "work").exists()


def test_a_model_of_the_working_directory_is_not_taken_for_one_beside_the_file(
    bench: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = bench("one")
    (folder / "model").rename(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="working directory has one"):
        _ = Grid(loaded(folder), "mini").runs


def test_a_file_that_changes_while_it_is_experimented_on_is_noticed(bench: Callable[..., Path], tmp_path: Path) -> None:
    """The plan was made for what was there before; nothing is stored under its digest or held against it."""
    folder, places = bench("one"), Places(tmp_path / "results", tmp_path / "work", None)
    todo = places.grid(loaded(folder), "mini").missing
    (folder / "mine.jsonl").write_text(rows(classification(60, 5)))
    (outcome,) = run_all(todo, places)
    assert "data.train changed after" in (outcome.error or "")
    assert kept(tmp_path) == {} and outcome.by_machine and places.given_up() == {}


# ---- a search with values that fail ----------------------------------------------------------------------------------


def test_a_file_that_is_half_written_is_no_failure_of_the_run(bench: Callable[..., Path], tmp_path: Path) -> None:
    """An editor empties a file before it writes it."""
    folder, places = bench("one"), Places(tmp_path / "r", tmp_path / "w", None)
    (run,) = Grid(loaded(folder), "mini").runs
    (folder / "mine.jsonl").write_text("")
    (outcome,) = run_all([run], places)
    assert outcome.error is not None and outcome.by_machine and places.given_up() == {}


def test_a_value_that_fails_is_the_worst_and_the_cell_goes_on(bench: Callable[..., Path], tmp_path: Path) -> None:
    """1e30 diverges by itself: its uploads are refused. The others choose; the table and status name it; `retry`
    forgets it."""
    folder = bench("one", text=MINE + TUNE)
    run = invoke("experiment", "run", folder / "mine.toml", *where(tmp_path))
    line = r"FedIT: train.lr = 1e\+30 is dropped .* seed 7: "
    assert re.search(line, run.stderr.replace("\n", " "))
    said = json.loads(invoke("experiment", "status", folder / "mine.toml", "--json", *where(tmp_path)).stdout)
    assert said["mine"] == {"search": [2, 3], "runs": [1, 1], "failed": 1, "to_do": 0}
    places = Places(tmp_path / "results", tmp_path / "work", None)
    table = invoke("experiment", "table", folder / "mine.toml", "--results", places.results, "--work", places.work)
    assert re.search(line, table.stdout) and re.search("│ FedIT .*│ +1 │", table.stdout)
    experiment, done = loaded(folder), places.finished()
    (cell,) = experiment.cells("mini")
    tried = {
        run.tuned: done[run.digest].validation_best for run in Grid(experiment, "mini").searches if run.digest in done
    }
    best = max(tried, key=lambda value: (tried[value], -(value or 0)))
    assert Grid(experiment, "mini", done, places.given_up()).choice(cell).value == best
    invoke("experiment", "retry", "--work", places.work, "--results", places.results)
    assert Grid(experiment, "mini", done, places.given_up()).choice(cell).value is None, "until it is tried again"


def test_what_the_machine_failed_is_no_worst_value(
    bench: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, main: Callable[..., Said]
) -> None:
    """A disk that is full while one value is tried says nothing of that value: nothing is chosen without it."""
    real = fedlora.runs.preparation.prepare

    def prepare(config: Any, *rest: Any) -> Any:
        if config.train.lr == 1e-3:
            raise OSError(28, "No space left on device")
        return real(config, *rest)

    folder = bench("one", text=MINE + TUNE.replace(", 1e30", ""))
    with monkeypatch.context() as patched:
        patched.setattr("fedlora.runs.preparation.prepare", prepare)
        said = main("experiment", "run", folder / "mine.toml", *where(tmp_path))
    assert "No space left on device" in said.err and said.code == 1 and "1 run failed" in said.err
    again = main("experiment", "run", folder / "mine.toml", *where(tmp_path))
    assert (again.code, "1 run failed" in again.err) == (1, True), "also where it is asked for once more"
    assert [found.settings.train.lr for found in kept(tmp_path).values()] == [1e-2], "the search alone"
    invoke("experiment", "retry", "--work", tmp_path / "work")
    invoke("experiment", "run", folder / "mine.toml", *where(tmp_path))
    assert len(kept(tmp_path)) == 3


def test_whose_failure_it_is() -> None:
    """By hand: errors by what caused them."""
    full = OSError(28, "No space left on device")
    try:
        raise ConfigError("the config cannot be read") from full
    except ConfigError as error:
        assert by_machine(error)
    assert by_machine(full) and by_machine(MemoryError()) and by_machine(CheckpointError("metrics.jsonl is damaged"))
    assert by_machine(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"))
    assert not by_machine(ConfigError("x")) and not by_machine(ValueError("NaN"))


def test_seeds_as_a_range(bench: Callable[..., Path], tmp_path: Path, main: Callable[..., Said]) -> None:
    """As `compare --seeds`: half-open."""
    folder = bench("one", text=MINE.replace("seeds = [0]", "seeds = [0, 1, 2]"))
    run = ("experiment", "run", folder / "mine.toml", *where(tmp_path), "--plan", "--seeds")
    assert "│ 2 " in invoke(*run, "0:2").stdout
    assert "--seeds 3 is not a seed" in main(*run, "0:4").complaint()
    assert "--seeds takes seeds as 0:8" in main(*run, "a").complaint()


def test_a_damaged_experiment_or_result_is_one_line(
    bench: Callable[..., Path], tmp_path: Path, main: Callable[..., Said]
) -> None:
    folder = bench("one")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "0.jsonl").write_text("[1]")
    said = main("experiment", "status", folder / "mine.toml", *where(tmp_path)).complaint()
    assert re.search("0.jsonl, line 1, .*no result", said)
    (tmp_path / "results" / "0.jsonl").unlink()
    (folder / "mine.toml").write_bytes(MINE.replace("Mine", "Café").encode("latin-1"))
    assert "mine.toml is not TOML" in main("experiment", "status", folder / "mine.toml", *where(tmp_path)).complaint()
