"""Runs that are killed, damaged and resumed: the same bits as if nothing had happened. Tiny transformers, no network.

Kinds of evidence: *end-to-end* (processes of their own, killed at random moments; the reference is the run that was
never stopped), *contract* (what is no part of this run is refused, and nothing is changed).
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedlora.errors import CheckpointError
from fedlora.runs.execution import execute
from fedlora.runs.folder import RunFolder
from fedlora.runs.preparation import prepare
from support.command_line import Said, options
from support.processes import lines_in, started, wait_for
from support.projects import configured, contents, ran, same_run

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


def test_stopped_between_two_checkpoints_it_goes_back_to_the_last_one(project: Path, tmp_path: Path) -> None:
    """checkpoint_every = 2: rounds after the checkpoint are played again, and their lines are not doubled."""
    config = configured(project, *SPARSE)
    whole, folder = ran(config, tmp_path / "whole"), ran(config, tmp_path / "run", 3)
    saved = sorted(p.name[:11] for p in whole.checkpoints.glob("*.safetensors"))
    assert saved == ["round-00004", "round-00005"], "the last round is always saved"
    assert len(folder.metrics()) == 3
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "los')  # the next line was half written
    ran(config, folder.path, resume=True)
    assert [line["round"] for line in folder.metrics()] == list(range(1, 6))
    same_run(folder, whole)


@pytest.mark.quick(1)
@pytest.mark.parametrize("at", [0, -40], ids=["empty", "one bit"])
def test_a_damaged_newest_checkpoint_is_warned_about_and_the_one_before_used(
    project: Path, uninterrupted: RunFolder, tmp_path: Path, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = configured(project, *LONG)
    folder = ran(config, tmp_path / "run", 7)
    newest = max(folder.checkpoints.glob("*.safetensors"))
    content = newest.read_bytes()
    newest.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :] if at else b"")
    ran(config, folder.path, resume=True)  # a Python warning would be an error here
    said, again = (record for record in caplog.records if record.name == "fedlora.runs")
    assert re.search("7 rounds.* round 6", again.getMessage())
    assert re.fullmatch(r"checkpoint round-00007\S+ is damaged: .*[.] Trying the one before it[.]", said.getMessage())
    same_run(folder, uninterrupted)


def test_an_unfinished_run_is_not_gone_on_with_as_another_one(
    project: Path, tmp_path: Path, main: Callable[..., Said]
) -> None:
    """Other settings are named with both values, and nothing changes. test_inputs.py changes what a run read."""
    folder = ran(configured(project), tmp_path / "run", 2)
    before = contents(folder.path)
    for change, says in {
        ("train.learning_rate=0.5",): "train.learning_rate is 0.02 there and 0.5 here",
        ("run.seed=9", "method.name=svd"): "9 here; method.name is 'glora'",
        ("run.rounds=1",): "run.rounds = 1",
    }.items():
        assert says in main("run", project / "config.toml", "--out", folder.path, "--resume", *options(change)).error()
        assert contents(folder.path) == before


def test_two_processes_do_not_write_one_run(project: Path, tmp_path: Path) -> None:
    """The second is refused while the first is at work, and not when it is done or was given up."""
    config = configured(project, "run.rounds=2")
    first = execute(prepare(config), RunFolder(tmp_path / "run"))
    next(first)
    with pytest.raises(CheckpointError, match="another process"):
        list(execute(prepare(config), RunFolder(tmp_path / "run"), resume=True))
    first.close()  # type: ignore[attr-defined]
    assert [record.round for record in execute(prepare(config), RunFolder(tmp_path / "run"), resume=True)] == [2]
