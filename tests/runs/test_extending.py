"""More rounds on resume, keys that may differ, moved folders, trackers that are missing.

Kinds of evidence: *end-to-end* on a tiny transformer (an extended run against one of that length from the start, to the
bit), *contract* (what is refused and how it is said).
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedlora.adapters.io import read_adapter
from fedlora.errors import CheckpointError
from fedlora.runs.config import RunConfig
from fedlora.runs.execution import execute_events
from fedlora.runs.folder import RunFolder
from fedlora.runs.inputs import DATA, differing
from fedlora.runs.preparation import prepare
from support.command_line import Said
from support.known_warnings import FUTURE_NAMES, NOT_ON_THE_HUB
from support.projects import configured, contents, make_project, ran, same_run

pytestmark = [FUTURE_NAMES, NOT_ON_THE_HUB]

PART = ("run.participation=0.6", "run.checkpoint_every=3")  # two of three clients a round, other ones each time


def as_if_from_the_start(folder: RunFolder) -> None:
    """The gauge check is made on a run's last round, so the round that was the last for a while has one more."""
    lines = [line if line["round"] == 5 else {**line, "gauge_drift": None} for line in folder.metrics()]
    (folder.path / "metrics.jsonl").write_text("".join(json.dumps(line, sort_keys=True) + "\n" for line in lines))


@pytest.fixture(scope="module")
def from_the_start(project: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return ran(configured(project, *PART, "run.rounds=5"), tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.parametrize("stopped", [None, 1])
def test_an_extended_run_is_the_longer_run_to_the_bit(
    project: Path, from_the_start: RunFolder, tmp_path: Path, stopped: int | None
) -> None:
    """Two rounds, finished or stopped in the first, then five; beside five from the start."""
    short, long = (configured(project, *PART, f"run.rounds={rounds}") for rounds in (2, 5))
    folder = ran(short, tmp_path / "extended", stopped)
    assert folder.finished() == (stopped is None)
    ran(long, folder.path, resume=True)
    as_if_from_the_start(folder)
    same_run(folder, from_the_start)


def test_by_the_command_line_and_the_result_is_shown_and_drawn_again(
    project: Path, tmp_path: Path, main: Callable[..., Said], drawn: None
) -> None:
    arguments = ("run", project / "config.toml", "--out", tmp_path / "run")
    main(*arguments, "--set", "run.rounds=1")
    before = (tmp_path / "run" / "plots" / "bytes.png").read_bytes()
    said = main(*arguments, "--resume", "--set", "run.rounds=2")
    assert "2 rounds, 3 clients" in said.out
    assert RunFolder(tmp_path / "run").read_json("summary.json")["rounds"] == 2
    assert (tmp_path / "run" / "plots" / "bytes.png").read_bytes() != before


RESULT = ("adapter", "best", "plots", "clients")


def result_of(folder: RunFolder) -> dict[str, tuple[str, int]]:
    """File -> digest and time, of what the end of a run made, beside its summary."""
    return {f"{name}/{path}": facts for name in RESULT for path, facts in contents(folder.path / name).items()}


@pytest.mark.parametrize("rounds", [0, 1])
def test_while_it_is_being_extended_the_shorter_result_stays_and_is_not_taken_for_the_longer_one(
    project: Path, tmp_path: Path, rounds: int
) -> None:
    """Killed before its first new round is done, or after one: the adapter of round 1 is there to the byte, and its
    card says of which round it is; the run is not finished, so no summary is read for the longer one's."""
    folder = ran(configured(project, "run.rounds=1", "run.readouts=true"), tmp_path / "run")
    folder.plots.mkdir()
    (folder.plots / "metric.png").write_bytes(b"a picture of round 1")
    before, summary = result_of(folder), folder.read_json("summary.json")
    longer = configured(project, "run.rounds=3", "run.readouts=true")
    if rounds:
        ran(longer, folder.path, rounds, resume=True)
    else:
        playing = execute_events(prepare(longer), folder, resume=True)
        next(playing)  # a client has trained
        playing.close()  # type: ignore[attr-defined]  # a generator, said to be an iterator

    assert result_of(folder) == before and {name.split("/")[0] for name in before} == set(RESULT)
    assert "round 1)" in (folder.path / "adapter" / "README.md").read_text()
    assert read_adapter(folder.path / "adapter")[0].modules
    assert not folder.finished() and folder.read_json("config.json")["run"]["rounds"] == 3
    assert folder.read_json("summary.before.json") == summary and summary["rounds"] == 1

    ran(longer, folder.path, resume=True)
    assert folder.read_json("summary.json")["rounds"] == 3
    assert "round 3)" in (folder.path / "adapter" / "README.md").read_text()
    assert not folder.plots.exists() and not (folder.path / "summary.before.json").exists()


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_schedule_over_rounds_cannot_be_extended(project: Path, tmp_path: Path, schedule: str) -> None:
    sets = (f"train.schedule={schedule}", "run.rounds=2")
    folder = ran(configured(project, *sets), tmp_path / "run", 1)
    before = contents(folder.path)
    with pytest.raises(CheckpointError, match=rf"run\.rounds = 2, .*4\b.*'{schedule}'.*constant"):
        ran(configured(project, *sets, "run.rounds=4"), folder.path, resume=True)
    assert contents(folder.path) == before


def test_what_is_stored_or_measured_on_the_way_may_differ(project: Path, tmp_path: Path) -> None:
    """And a finished run gets what it lacks: each client's readout, and its score."""
    folder = ran(configured(project, "run.rounds=2"), tmp_path / "run")
    more = ("run.readouts=true", "evaluate.clients_at_end=true")
    ran(configured(project, "run.rounds=2", *more), folder.path, resume=True)
    assert {path.name for path in (folder.path / "clients").iterdir()} == {"site-1", "site-2", "site-3"}
    assert set(folder.read_json("summary.json")["clients_at_end"]) == {"site-1", "site-2", "site-3"}


LATE = ("run.keep_uploads=last", "run.checkpoint_every=2", "run.keep_checkpoints=1", "evaluate.every=2")


def test_what_is_done_on_the_way_is_refused_where_no_round_is_left(project: Path, tmp_path: Path) -> None:
    """Before: taken, written into config.json, and without effect. With a round left it holds for that one."""
    folder = ran(configured(project, "run.rounds=1", "train.steps=1"), tmp_path / "run")
    before = contents(folder.path)
    for key in LATE:
        name = key.partition("=")[0]
        with pytest.raises(CheckpointError, match=rf"1 round .*{name} is .*\(run\.rounds = 2\)"):
            ran(configured(project, "run.rounds=1", "train.steps=1", key), folder.path, resume=True)
        assert contents(folder.path) == before
    ran(configured(project, "run.rounds=2", "train.steps=1", *LATE), folder.path, resume=True)
    assert folder.read_json("summary.json")["rounds"] == 2
    found = folder.newest_uploads()
    assert found is not None and (found.round, len(found.folders)) == (2, 3)


def test_a_run_that_stopped_early_has_no_round_left(project: Path, tmp_path: Path) -> None:
    """Nor has it with more rounds asked for: it would stop where it stopped."""
    still = ("train.lr=1e-12", "train.steps=1", "evaluate.patience=1")
    folder = ran(configured(project, *still, "run.rounds=5"), tmp_path / "run")
    assert folder.ended() == 2
    with pytest.raises(CheckpointError, match=r"2 rounds with none left.*--out"):
        ran(configured(project, *still, "run.rounds=7", "run.keep_uploads=last"), folder.path, resume=True)


def test_a_key_without_effect_of_an_old_run_is_no_difference(project: Path, tmp_path: Path) -> None:
    """Old configurations could hold one; it has to be left out now, and the run goes on all the same."""
    config = configured(project, "run.rounds=2")
    folder = ran(config, tmp_path / "run", 1)
    stored = folder.read_json("config.json")
    stored["data"]["tasks"] = 7
    (folder.path / "config.json").write_text(json.dumps(stored))
    assert ran(config, folder.path, resume=True).finished()


def test_a_project_that_was_moved_goes_on_and_one_with_other_data_does_not(tmp_path: Path) -> None:
    """The digest of the configuration holds absolute paths, so it differs; data and model are known by content."""
    project = make_project(tmp_path / "here")
    sets = ("run.rounds=3",)
    folder = ran(configured(project, *sets), tmp_path / "here" / "run", 1)
    shutil.move(tmp_path / "here", tmp_path / "there")
    moved: RunConfig = configured(tmp_path / "there", *sets)
    folder = RunFolder(tmp_path / "there" / "run")
    assert folder.read_json("manifest.json")["config_digest"] != moved.digest()

    file = tmp_path / "there" / "train.jsonl"
    text = file.read_text()
    file.write_text(text.replace("w9", "w10"))
    with pytest.raises(CheckpointError, match=r"other content .*'site-1' \(\d+ examples there"):
        ran(moved, folder.path, resume=True)
    file.write_text(text)
    ran(moved, folder.path, resume=True)
    same_run(folder, ran(moved, tmp_path / "fresh"))


def test_a_missing_tracker_leaves_no_folder_behind(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, main: Callable[..., Said]
) -> None:
    """Before: the folder was there, and blocked the next run without the tracker."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    arguments = ("run", project / "config.toml", "--out", tmp_path / "run", "--set", "run.rounds=1")
    said = main(*arguments, "--set", 'run.track=["wandb"]')
    assert re.search("run.track names wandb, .*not installed", said.complaint())
    assert not (tmp_path / "run").exists()
    assert main(*arguments).code == 0


def test_a_round_on_the_way_is_not_made_the_last_one(project: Path, tmp_path: Path) -> None:
    """It was not evaluated (every = 3), nor checked, nor were its uploads kept: fewer rounds than that are refused."""
    folder = ran(configured(project, "run.rounds=4", "evaluate.every=3"), tmp_path / "run", 2)
    fewer = configured(project, "run.rounds=2", "evaluate.every=3", "run.keep_uploads=last")
    with pytest.raises(CheckpointError, match=r"round 2 .*run.rounds = 3 "):
        ran(fewer, folder.path, resume=True)
    ran(configured(project, "run.rounds=3", "evaluate.every=3"), folder.path, resume=True)
    assert folder.read_json("summary.json")["rounds"] == 3


def test_readouts_of_the_shorter_run_do_not_stay(project: Path, tmp_path: Path) -> None:
    folder = ran(configured(project, "run.rounds=1", "run.readouts=true"), tmp_path / "run")
    assert (folder.path / "clients").is_dir()
    ran(configured(project, "run.rounds=2"), folder.path, resume=True)
    assert not (folder.path / "clients").exists()


def test_a_changed_own_test_set_is_other_data() -> None:
    """A part that the manifest has of a client's own; the same is no difference."""
    data = {"train": {}, "probes": {}, "validation": None, "test": None, "labels": []}
    ours = {"data": {**data, "own_test": {"a": {"examples": 3, "sha256": "x"}}}}
    theirs = {"data": {**data, "own_test": {"a": {"examples": 3, "sha256": "y"}}}}
    assert re.search(r"test set of 'a' \(3 examples there, 3 here, ", *differing(theirs, ours)[DATA])
    assert differing(ours, ours) == {}
