"""Results on disk: a file an experiment, a line a run; several processes gather; a frame for pandas. Kinds: property,
oracle (by hand), hostile, end-to-end on real processes."""

from __future__ import annotations

import importlib
import json
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

import fedlora
from fedlora.errors import CheckpointError
from fedlora.experiments import store
from fedlora.experiments.grid import Grid
from fedlora.experiments.result import Result, short_config, whole_config
from fedlora.experiments.spec import load_experiment
from fedlora.experiments.store import as_lines, gather, read_results, read_results_of
from fedlora.experiments.table_forms import Table, latex
from fedlora.runs.config import parse_config
from fedlora.runs.manifest import commit_of_code
from support.known_warnings import FUTURE_NAMES, NOT_ON_THE_HUB
from support.made_results import bare, stored, whole
from support.processes import Program
from support.small_world import small_world, where
from support.training_data import classification, rows, save_encoder

pytestmark = [FUTURE_NAMES, NOT_ON_THE_HUB]


def test_a_checkout_that_pip_has_not_installed_makes_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its versions lacked a string, and each run failed after its training (seen on a GPU machine)."""
    module = importlib.import_module("fedlora.runs.manifest")  # the package has a function of that name
    monkeypatch.setattr(module, "installed", {"numpy": "2.0"}.get)
    versions = module.code_facts()["versions"]
    assert TypeAdapter(Result.model_fields["versions"].annotation).validate_python(versions) == {"numpy": "2.0"}


_TABLES: Any = st.recursive(
    st.none() | st.integers(0, 2) | st.lists(st.integers(0, 1), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(st.dictionaries(st.sampled_from("abcd"), _TABLES, max_size=4), min_size=1, max_size=4))
def test_what_is_shared_and_what_is_a_runs_own_are_the_whole(each: list[dict[str, Any]]) -> None:
    shared = store._shared(each)
    assert [store._with(store._without(one, shared), shared) for one in each] == each


def test_six_digits_are_kept_and_all_of_what_a_run_is_known_by(tmp_path: Path) -> None:
    config = parse_config({"model": {"path": "m"}, "data": {"train": "x.csv"}, "train": {"lr": 0.00123456789}})
    gather(tmp_path, "e", bare(config.digest(), config=short_config(config), wall_seconds=1 / 3))
    (found,) = read_results(tmp_path).values()
    assert found.wall_seconds == 0.333333 and found.settings == config
    assert whole_config(json.loads((tmp_path / "e.jsonl").read_text().splitlines()[0])["shared"]["config"]) == config


def test_rounds_stand_in_columns_and_come_back(tmp_path: Path) -> None:
    """A client that a round did not ask is no client that diverged, and an evaluation without a number is one."""
    lines = [
        {"round": 1, "metrics": {}, "losses": {"a": 0.5, "b": None}},
        {"round": 2, "metrics": {"loss": None, "accuracy": 0.5}, "losses": {"a": 0.4}},
    ]  # fmt: skip
    gather(tmp_path, "e", bare("x", lines, best_round=2))
    history = read_results(tmp_path)["x"].history
    assert [history.losses_of(t) for t in (1, 2)] == [{"a": 0.5, "b": None}, {"a": 0.4}]
    assert (history.evaluated, history.scores_of(1), history.scores_of(2)) == ([2], {}, lines[1]["metrics"])


def test_a_run_belongs_to_one_file(tmp_path: Path) -> None:
    """Asked by a second experiment: it is found where it is."""
    for name in ("first", "second"):
        gather(tmp_path, name, bare("x"))
    assert [path.name for path in tmp_path.glob("*.jsonl")] == ["first.jsonl"]


def _gather_some(folder: Path, start: int) -> None:
    for k in range(start, start + 10):
        gather(folder, "e", bare(f"{k:02d}"))


def test_processes_that_gather_at_once_lose_nothing(tmp_path: Path) -> None:
    """Three at once, each with a lock of its own, which the system keeps apart as it does those of processes."""
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(_gather_some, [tmp_path] * 3, (0, 10, 20)))
    assert sorted(read_results(tmp_path)) == [f"{k:02d}" for k in range(30)]
    assert [path.name for path in tmp_path.iterdir()] == ["e.jsonl"], "no lock is left in a folder that git tracks"


def test_a_changed_file_is_read_again_and_an_unchanged_one_is_not(tmp_path: Path) -> None:
    gather(tmp_path, "e", bare("x"))
    first = read_results(tmp_path)["x"]
    assert read_results(tmp_path)["x"] is first
    gather(tmp_path, "e", bare("y"))
    assert set(read_results(tmp_path)) == {"x", "y"}


@pytest.mark.parametrize("line", [b"{", b"[1]", b'{"rounds": 2}', b'{"digest": 5}', b"\xff"])
def test_a_line_that_is_no_result_is_named(tmp_path: Path, line: bytes) -> None:
    gather(tmp_path, "e", bare("x"))
    path = tmp_path / "e.jsonl"
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(CheckpointError, match=r"e.jsonl, line \d") as refused:
        read_results(tmp_path)
    assert "git" in str(refused.value)


def test_numbers_that_nobody_wrote_and_files_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    """Of a run that two files have alike the frame has one row."""
    told = bare("x", test={"best": {"accuracy": 0.5}, "last": {"accuracy": 0.25}})
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(as_lines({"x": told}))
    assert len(fedlora.results(tmp_path)) == 1
    (tmp_path / "b.jsonl").write_text(as_lines({"x": told.model_copy(update={"wall_seconds": 7.0})}))
    for ask in (read_results, fedlora.results):
        with pytest.raises(CheckpointError, match=r"the run x .*b\.jsonl .*other numbers"):
            ask(tmp_path)
    first, line = as_lines({"x": told, "y": bare("y")}).splitlines()[:2]
    assert "0.25" in line
    (tmp_path / "b.jsonl").write_text("\n".join([first, line.replace("0.25", "1e999"), ""]))
    with pytest.raises(CheckpointError, match=r"b\.jsonl, line 2.*1e999"):
        read_results(tmp_path)


def test_two_versions_of_a_file_joined_line_by_line_are_refused(tmp_path: Path) -> None:
    """An attacker let git join two clones' files: a run was read under the other's first line, which had its seed and
    its scores. So is an edited first line; a line that is taken out is a run that is missing."""
    a, b = {"x": bare("x")}, {"y": bare("y").model_copy(update={"wall_seconds": 7.0})}
    (first, of_a), (other, of_b) = (as_lines(one).splitlines() for one in (a, b))
    path = tmp_path / "e.jsonl"
    joined = {"both headers": (3, [first, of_a, other, of_b]), "one header": (3, [first, of_a, of_b]),
              "edited": (2, [first.replace("0", "1", 1), of_a])}  # fmt: skip
    for name, (line, lines) in joined.items():
        path.write_text("\n".join([*lines, ""]))
        with pytest.raises(CheckpointError, match=rf"e\.jsonl, line {line},.*git checkout") as told:
            read_results_of(path)
        assert "take the line out" not in str(told.value), name
    both = as_lines({**a, **b}).splitlines()
    path.write_text("\n".join([*both[:2], ""]))
    assert list(read_results_of(path)) == ["x"]


def test_the_frame_has_a_row_a_run_and_one_a_round(tmp_path: Path) -> None:
    """By hand: eight runs of two methods, loss 0.6 + a hundredth of the seed, of `new` 0.1 less and a little noise."""
    place = small_world(tmp_path / "place")
    runs = fedlora.results(place / "results")
    assert len(runs) == 8 and set(runs.method) == {"fedit", "glora"}
    assert runs[runs.method == "fedit"].sort_values("seed")["test, last"].tolist() == pytest.approx(
        [0.60, 0.61, 0.62, 0.63]
    )
    rounds = fedlora.results(place / "results" / "made.jsonl", by_round=True)
    one = rounds[(rounds.digest == runs.digest.iloc[0]) & (rounds.metric == "loss")]
    assert list(one["round"]) == [1, 2] and set(rounds.metric) == {"loss", "accuracy", "training loss"}
    with pytest.raises(FileNotFoundError, match="no results"):
        fedlora.results(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"summary\.json"):
        fedlora.results(tmp_path)


def test_the_table_in_latex(tmp_path: Path) -> None:
    from support.command_line import invoke

    place = small_world(tmp_path / "place")
    latex = invoke("experiment", "table", "small", "--format", "latex", *where(place)).stdout
    assert r"\begin{tabular}{lrr}" in latex and r"0.6150 $\pm$ 0.0129 & 4 \\" in latex


# ---- two processes on one folder -------------------------------------------------------------------------------------

TWO = """
title = "Two"
question = "?"
[run.model]
path = "model"
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
GLoRA = { "method.name" = "glora" }
[tune]
values = [1e-3, 1e-2]
seeds = [7]
[profiles.mini]
seeds = [0]
"""


def test_two_processes_on_one_folder_share_the_runs_and_both_end_well(
    tmp_path: Path, program: Callable[..., Program]
) -> None:
    """Four runs of the search and two that it decides; each is made once, and each process ends with 0."""
    save_encoder(tmp_path / "model")
    (tmp_path / "mine.jsonl").write_text(rows(classification(60, 0)))
    (tmp_path / "two.toml").write_text(TWO)
    words = ("experiment", "run", tmp_path / "two.toml", "--results", tmp_path / "results", "--work", tmp_path / "work")
    both = [program(Path(fedlora.__file__).with_name("__main__.py"), *words) for _ in range(2)]
    ended = [one.ended() for one in both]
    said = [one.stderr for one in ended]
    assert [one.returncode for one in ended] == [0, 0], said
    found: dict[str, Result] = read_results(tmp_path / "results")
    assert len(found) == 6
    experiment = load_experiment(tmp_path / "two.toml")
    assert all(run.digest in found for run in Grid(experiment, "mini", found).runs)
    done = [line for text in said for line in text.splitlines() if " done, " in line]
    assert done and all("two: " in line for line in done), "a line a run where no bar is seen"


def test_made_results_are_whole(tmp_path: Path) -> None:
    """The support of these tests: what it makes is read back as it was made."""
    place = small_world(tmp_path / "place")
    (run, *_) = Grid(load_experiment(place / "experiments" / "small.toml"), "mini").runs
    made = stored(whole(run, "loss", {"loss": 0.5}))
    gather(tmp_path / "r", "e", made)
    assert read_results(tmp_path / "r")[run.digest] == made


def test_a_run_that_stands_twice_is_told(tmp_path: Path) -> None:
    """A line copied by hand over another one: one run would be gone in silence."""
    first, one, *others = as_lines({"x": bare("x"), "y": bare("y"), "z": bare("z")}).splitlines()
    file = tmp_path / "e.jsonl"
    file.write_text("\n".join([first, one, one, *others[1:]]) + "\n")
    with pytest.raises(CheckpointError, match=f"{json.loads(one)['digest']} stands there twice"):
        read_results(tmp_path)


def test_a_latex_row_is_no_argument_of_the_line_break_before_it() -> None:
    """LaTeX reads a "[" or "*" behind \\\\ as its argument, despite blanks; an empty group parts them."""
    lines = latex(Table(["of", "mean"], [["a", "1"], ["[b]", "2"], ["* c", "3"]], "")).splitlines()
    assert [line for line in lines if line.endswith(r"\\")][1:] == [r"a & 1 \\", r"{}[b] & 2 \\", r"{}* c & 3 \\"]


def test_results_that_a_checkout_stores_do_not_change_its_code(tmp_path: Path) -> None:
    """A grid that is stored in the checkout of the code does not make its own later results dirty."""
    code, other, stored = tmp_path / "src" / "code.py", tmp_path / "other" / "code.py", tmp_path / "stored.jsonl"
    for file in (code, other, stored):
        file.parent.mkdir(exist_ok=True)
        file.write_text("1\n")
    for words in (("init", "-q"), ("add", "."), ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a")):
        subprocess.run(["git", "-C", tmp_path, *words], check=True)
    stored.write_text("2\n")
    found = commit_of_code(code.parent)
    assert found is not None and found["clean"] is True
    other.write_text("changed\n")  # the suite remembers what git said of a folder
    assert commit_of_code(other.parent) == {**found, "clean": False}
