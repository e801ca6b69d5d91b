"""More rounds on resume, keys that may differ, trackers that are missing.

Kinds of evidence: *end-to-end* on a tiny transformer (an extended run against one of that length from the start, to the
bit), *contract* (what is refused and how it is said).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fedlora.errors import CheckpointError
from fedlora.runs.folder import RunFolder
from support.projects import configured, contents, ran, same_run

PART = ("run.participation=0.6", "run.checkpoint_every=3")  # two of three clients a round, other ones each time


def as_if_from_the_start(folder: RunFolder) -> None:
    """The gauge check is made on a run's last round, so the round that was the last for a while has one more."""
    lines = [line if line["round"] == 5 else {**line, "gauge_drift": None} for line in folder.metrics()]
    (folder.path / "metrics.jsonl").write_text("".join(json.dumps(line, sort_keys=True) + "\n" for line in lines))


def test_an_extended_run_is_the_longer_run_to_the_bit(project: Path, tmp_path: Path) -> None:
    """Two rounds, finished or stopped in the first, then five; beside five from the start."""
    short, long = (configured(project, *PART, f"run.rounds={rounds}") for rounds in (2, 5))
    whole = ran(long, tmp_path / "whole")
    for name, stopped in (("finished", None), ("stopped", 1)):
        folder = ran(short, tmp_path / name, stopped)
        assert folder.finished() == (stopped is None)
        ran(long, folder.path, resume=True)
        as_if_from_the_start(folder)
        same_run(folder, whole)


def test_a_run_that_is_being_extended_is_unfinished_and_keeps_its_adapter_and_needs_its_states(
    project: Path, tmp_path: Path
) -> None:
    """Without a state of the finished run all its rounds would be trained again, over its result."""
    folder = ran(configured(project, "run.rounds=1"), tmp_path / "run")
    lost = RunFolder(shutil.copytree(folder.path, tmp_path / "lost"))
    shutil.rmtree(lost.checkpoints)
    before = contents(lost.path)
    with pytest.raises(CheckpointError, match="no state of it"):
        ran(configured(project, "run.rounds=3"), lost.path, resume=True)
    assert contents(lost.path) == before
    ran(configured(project, "run.rounds=3"), folder.path, 1, resume=True)
    assert not folder.finished() and "round 1)" in (folder.path / "adapter" / "README.md").read_text()


def test_a_schedule_over_rounds_cannot_be_extended(project: Path, tmp_path: Path) -> None:
    sets = ("train.lr_scheduler_type=linear", "run.rounds=2")
    folder = ran(configured(project, *sets), tmp_path / "run", 1)
    with pytest.raises(CheckpointError, match=r"run\.rounds .*2.*4.* constant"):
        ran(configured(project, *sets, "run.rounds=4"), folder.path, resume=True)


def test_what_is_stored_or_measured_on_the_way_may_differ(project: Path, tmp_path: Path) -> None:
    """And a finished run gets what it lacks: each client's readout, and its score."""
    folder = ran(configured(project, "run.rounds=2"), tmp_path / "run")
    folder.plots.mkdir()
    (folder.plots / "metric.png").write_text("of an earlier end")
    more = ("run.readouts=true", "evaluate.clients_at_end=true")
    ran(configured(project, "run.rounds=2", *more), folder.path, resume=True)
    assert {path.name for path in (folder.path / "clients").iterdir()} == {"site-1", "site-2", "site-3"}
    assert set(folder.read_json("summary.json")["clients_at_end"]) == {"site-1", "site-2", "site-3"}
    ran(configured(project, "run.rounds=3"), folder.path, resume=True)
    assert not (folder.path / "clients").exists(), "readouts of the shorter run do not stay"
    assert not (folder.plots / "metric.png").exists(), "to be drawn again"
