"""A run in several processes is the run in one: every number and every file, whatever is killed.

The expected value is the run with `run.workers = 1`, which is this process at one thread.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedlora.errors import ClientFailed, ConfigError, WorkerDied
from fedlora.runs.execution import execute
from fedlora.runs.folder import RunFolder
from fedlora.runs.preparation import prepare
from support.projects import configured, ran, without_seconds, written


def facts(folder: RunFolder) -> Any:
    """What a run says and leaves, without times; the names of its states hold digests."""
    states = sorted(path.name for path in folder.checkpoints.rglob("*.safetensors"))
    return without_seconds([folder.read_json("summary.json"), folder.metrics()]), written(folder), states


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "sets",
    [
        (),
        ("method.name=fedex-lora", "clients.ranks=[4,4,4]", "evaluate.clients_at_end=true"),
        ("method.name=fedsa-lora", "clients.ranks=[4]", "clients.count=3", "lora.lora_dropout=0.1", "run.rounds=2"),
    ],
    ids=["glora", "base-changes", "clients-are-measured"],
)
def test_any_number_of_workers_gives_the_same_run(project: Path, tmp_path: Path, sets: tuple[str, ...]) -> None:
    want = facts(ran(configured(project, *sets, "run.workers=1"), tmp_path / "1"))
    assert facts(ran(configured(project, *sets, "run.workers=3"), tmp_path / "3")) == want


def test_a_killed_worker_fails_its_client_and_the_run_goes_on_by_resume(project: Path, tmp_path: Path) -> None:
    """A worker is killed when the first round is done; none is left, nor where the run is given up."""
    want = facts(ran(configured(project, "run.workers=1"), tmp_path / "whole"))
    before = psutil.Process().children()
    playing = execute(prepare(configured(project, "run.workers=2")), RunFolder(tmp_path / "killed"))
    next(playing)
    workers = [child for child in psutil.Process().children() if child not in before]
    assert len(workers) == 2
    threading.Timer(0.05, workers[0].kill).start()
    with suppress(ClientFailed, WorkerDied):  # no work may have been under way in that one
        list(playing)
    assert not psutil.wait_procs(workers, 10)[1] and not {*psutil.Process().children()} - {*before}
    assert facts(ran(configured(project, "run.workers=2"), tmp_path / "killed", resume=True)) == want
    given_up = execute(prepare(configured(project, "run.workers=2")), RunFolder(tmp_path / "given-up"))
    next(given_up)
    workers = [child for child in psutil.Process().children() if child not in before]
    given_up.close()  # type: ignore[attr-defined]
    assert workers and not psutil.wait_procs(workers, 10)[1]


def test_auto_is_the_cores_but_no_more_than_a_round_has_clients(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedlora.runs.sections.available", lambda device: 64)
    assert prepare(configured(project, "run.workers=auto")).processes == 3
    assert prepare(configured(project, "run.workers=auto", "run.participation=0.5")).processes == 2
    assert prepare(configured(project)).processes == 1


def test_settings_that_contradict_each_other_are_refused(project: Path) -> None:
    with pytest.raises(ConfigError, match=r"run.workers = 2 .*run.threads = 2"):
        configured(project, "run.workers=2", "run.threads=2")
    with pytest.raises(ConfigError, match=r"run\.workers = 2 .*load_in_4bit"):
        prepare(configured(project, "run.workers=2", "model.load_in_4bit=true"))
