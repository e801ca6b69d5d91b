"""Runs that are killed, damaged and resumed: the same bits as if nothing had happened. Tiny transformers, no network.

Kinds of evidence: *end-to-end* (processes of their own, killed at random moments; the reference is the run that was
never stopped), *contract* (what is no part of this run is refused, and nothing is changed).
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlora.errors import CheckpointError
from fedlora.runs.execution import execute
from fedlora.runs.folder import RunFolder
from fedlora.runs.preparation import prepare
from support.command_line import Said, invoke
from support.known_warnings import FUTURE_NAMES, NOT_ON_THE_HUB
from support.processes import lines_in, started, wait_for
from support.projects import configured, contents, make_project, ran, same_run
from support.tiny_models import bert
from support.training_data import classification, rows, save_model

pytestmark = [FUTURE_NAMES, NOT_ON_THE_HUB]

LONG = ("run.rounds=8", "train.max_steps=3", "evaluate.clients_at_end=true")


@pytest.fixture(scope="session")
def uninterrupted(project: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return ran(configured(project, *LONG), tmp_path_factory.mktemp("uninterrupted") / "run")


@pytest.mark.parametrize("kills", [(2, 8), pytest.param((0, 2, 5, 8), marks=pytest.mark.exhaustive)])
def test_killed_at_random_moments_and_resumed_it_gives_the_same_bits(
    uninterrupted: RunFolder, project: Path, tmp_path: Path, forked: Any, kills: tuple[int, ...]
) -> None:
    """SIGKILL, up to four times: early, in the middle, between a round's line and its checkpoint or wherever it falls,
    and while the results are written. Then to the end."""
    out, moment = tmp_path / "run", random.Random()
    killed = []
    for at_least in kills:
        child = started(forked, project, out, LONG)
        wait_for(child, lambda wanted=at_least: (out / "manifest.json").exists() and lines_in(out) >= wanted)
        time.sleep(moment.uniform(0, 0.06))
        child.kill()
        child.join(30)
        killed.append((child.exitcode, lines_in(out)))
        assert child.exitcode in (-signal.SIGKILL, 0), (tmp_path / "log.txt").read_text()
    assert sum(code == -signal.SIGKILL for code, _ in killed) >= len(kills) - 1, killed
    child = started(forked, project, out, LONG)
    child.join(60)
    log = (tmp_path / "log.txt").read_text()
    assert child.exitcode == 0, log
    assert "Traceback" not in log
    same_run(RunFolder(out), uninterrupted)
    assert not list(out.rglob("*.part"))


def test_an_interrupt_stops_with_a_hint_and_the_run_goes_on_later(
    uninterrupted: RunFolder, project: Path, tmp_path: Path, forked: Any
) -> None:
    out = tmp_path / "run"
    child = started(forked, project, out, LONG)
    wait_for(child, lambda: lines_in(out) >= 2)
    while child.is_alive():  # one interrupt may fall into a destructor, where Python ignores it
        os.kill(child.pid, signal.SIGINT)
        child.join(0.3)
    ran(configured(project, *LONG), out, resume=True)
    same_run(RunFolder(out), uninterrupted)
    log = (tmp_path / "log.txt").read_text()
    assert child.exitcode == 130 and "Traceback" not in log, log
    assert "--resume" in log, "as `cli.main` means to say"


SPARSE = ("run.rounds=5", "run.checkpoint_every=2", "train.max_steps=2")


@pytest.fixture(scope="module")
def sparse(project: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return ran(configured(project, *SPARSE), tmp_path_factory.mktemp("sparse") / "run")


@pytest.mark.parametrize("stop", [1, 3])
def test_stopped_between_two_checkpoints_it_goes_back_to_the_last_one(
    project: Path, sparse: RunFolder, tmp_path: Path, stop: int
) -> None:
    """checkpoint_every = 2: rounds after the checkpoint are played again, and their lines are not doubled."""
    config, whole = configured(project, *SPARSE), sparse
    saved = sorted(p.name[:11] for p in whole.checkpoints.glob("*.safetensors"))
    assert saved == ["round-00004", "round-00005"], "the last round is always saved"
    folder = ran(config, tmp_path / "run", stop)
    assert len(folder.metrics()) == stop
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "los')  # the next line was half written
    ran(config, folder.path, resume=True)
    assert [line["round"] for line in folder.metrics()] == list(range(1, 6))
    same_run(folder, whole)


@pytest.fixture(scope="module")
def stopped_late(project: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Seven of eight rounds. Tests take a copy."""
    return ran(configured(project, *LONG), tmp_path_factory.mktemp("stopped") / "run", 7)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: content[:-40] + bytes([content[-40] ^ 1]) + content[-39:],
        lambda content: b"",
    ],
    ids=["cut off", "one bit", "empty"],
)
def test_a_damaged_newest_checkpoint_is_warned_about_and_the_one_before_used(
    project: Path,
    uninterrupted: RunFolder,
    stopped_late: RunFolder,
    tmp_path: Path,
    damage: Callable[[bytes], bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = configured(project, *LONG)
    folder = RunFolder(shutil.copytree(stopped_late.path, tmp_path / "run"))
    newest = max(folder.checkpoints.glob("*.safetensors"))
    assert newest.name.startswith("round-00007")
    newest.write_bytes(damage(newest.read_bytes()))
    ran(config, folder.path, resume=True)  # a Python warning would be an error here
    said, again = (record for record in caplog.records if record.name == "fedlora.runs")
    assert re.search("7 rounds.* round 6", again.getMessage())
    assert re.fullmatch(r"checkpoint round-00007\S+ is damaged: .*[.] Trying the one before it[.]", said.getMessage())
    same_run(folder, uninterrupted)


def test_with_no_sound_checkpoint_left_it_says_so(
    project: Path, tmp_path: Path, main: Callable[..., Said], caplog: pytest.LogCaptureFixture
) -> None:
    folder = ran(configured(project), tmp_path / "run", 2)
    for path in folder.checkpoints.glob("*.safetensors"):
        path.write_bytes(b"nonsense")
    before = contents(folder.path)
    said = main("run", project / "config.toml", "--out", folder.path, "--resume")
    assert sum("is damaged" in record.getMessage() for record in caplog.records) == 2
    assert said.code == 2 and "none of the 2 checkpoints" in said.err and "Traceback" not in said.err
    assert contents(folder.path) == before


def test_a_run_that_was_killed_while_its_plots_were_drawn_gets_them_when_resumed(
    uninterrupted: RunFolder, project: Path, tmp_path: Path, drawn: None
) -> None:
    """The summary is there, the plots are not; they need the result files only, and no other command draws them."""
    shutil.copytree(uninterrupted.path, tmp_path / "run")
    invoke(
        "run", project / "config.toml", "--out", tmp_path / "run", "--resume", *(a for s in LONG for a in ("--set", s))
    )
    assert {path.name for path in (tmp_path / "run" / "plots").glob("*")} == {"metric.png", "bytes.png", "spectrum.png"}


def test_a_run_that_was_killed_before_its_manifest_starts_afresh(project: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".config.json.0123456789ab.part").write_text('{"clie')
    assert ran(configured(project, "run.rounds=1"), tmp_path / "run").finished()
    assert not list((tmp_path / "run").rglob("*.part"))


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project and two of three rounds of it, in `run`. Tests take a copy."""
    project = make_project(tmp_path_factory.mktemp("unfinished"))
    ran(configured(project), project / "run", 2)
    return project


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (["--set", "train.learning_rate=0.5"], "train.learning_rate is 0.02 there and 0.5 here. "),
        (["--set", "run.seed=9", "--set", "method.name=svd"], "9 here; method.name is 'glora'"),
        (["--set", "run.rounds=1"], "you ask for run.rounds = 1"),
        (["--set", "train.lr_scheduler_type=linear"], "train.lr_scheduler_type is 'constant' there"),
        ([], "data.train.site-1"),
    ],
)
def test_an_unfinished_run_is_not_gone_on_with_as_another_one(
    unfinished: Path, tmp_path: Path, main: Callable[..., Said], change: list[str], says: str
) -> None:
    project = shutil.copytree(unfinished, tmp_path / "project")
    folder = RunFolder(project / "run")
    if not change:
        (project / "train.jsonl").write_text(rows(classification(150, 1)))
    before = contents(folder.path)
    said = main("run", project / "config.toml", "--out", folder.path, "--resume", *change)
    assert says in said.error()
    assert contents(folder.path) == before


def test_a_run_is_not_gone_on_with_on_another_model_or_thread_count(tmp_path: Path) -> None:
    project = make_project(tmp_path / "project")
    config = configured(project)
    folder = ran(config, tmp_path / "run", 1)
    with pytest.raises(CheckpointError, match=r"threads \(1 there, 2 here"):
        ran(configured(project, "run.threads=2"), folder.path, resume=True)
    network = bert().bert
    with torch.no_grad():
        next(network.parameters()).add_(0.01)
    save_model(project / "model", network, classifies=True)
    with pytest.raises(CheckpointError, match=r"other content of: model\.sha256\.model\.safetensors\. "):
        ran(config, folder.path, resume=True)


def test_two_processes_do_not_write_one_run(project: Path, tmp_path: Path) -> None:
    """The second is refused while the first is at work, and not when it is done or was given up."""
    config = configured(project, "run.rounds=2")
    first = execute(prepare(config), RunFolder(tmp_path / "run"))
    next(first)
    with pytest.raises(CheckpointError, match="another process"):
        list(execute(prepare(config), RunFolder(tmp_path / "run"), resume=True))
    first.close()  # type: ignore[attr-defined]
    assert [record.round for record in execute(prepare(config), RunFolder(tmp_path / "run"), resume=True)] == [2]
