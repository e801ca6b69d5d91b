"""What somebody put into a run's folder is not replaced when the run goes on; what is gone is made again.

Kinds of evidence: *end-to-end* on a tiny transformer, *contract* (what is refused, how it is said, and that nothing was
changed).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fedlora.errors import CheckpointError, ConfigError
from fedlora.runs.folder import PICTURES, RunFolder
from support.command_line import Said
from support.known_warnings import FUTURE_NAMES, NOT_ON_THE_HUB
from support.projects import configured, contents, ran, same_run, written

pytestmark = [FUTURE_NAMES, NOT_ON_THE_HUB]

BASE = ("run.rounds=2", "train.steps=2", "run.readouts=true")
LONGER = (*BASE[1:], "run.rounds=4")
PLACES = ("adapter", "best", "clients/site-2")


@pytest.fixture(scope="module")
def whole(project: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run of two rounds. Tests take a copy."""
    return ran(configured(project, *BASE), tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture
def folder(whole: RunFolder, tmp_path: Path) -> RunFolder:
    return RunFolder(shutil.copytree(whole.path, tmp_path / "run"))


def refused(project: Path, folder: RunFolder, *sets: str) -> str:
    before = contents(folder.path)
    with pytest.raises(ConfigError) as caught:
        ran(configured(project, *sets), folder.path, resume=True)
    assert contents(folder.path) == before
    return str(caught.value)


@pytest.mark.parametrize("sets", [LONGER, BASE[:2]], ids=["more rounds", "a harmless key"])
@pytest.mark.parametrize("place", PLACES)
def test_a_file_that_was_put_among_them_ends_the_resume_before_training(
    project: Path, folder: RunFolder, place: str, sets: tuple[str, ...]
) -> None:
    (folder.path / place / "eval.json").write_text("{}")
    said = refused(project, folder, *sets)
    assert f"{place} holds 'eval.json'" in said
    assert "not replaced" in said and "--out" in said


def test_what_is_beside_the_runs_own_stays(project: Path, folder: RunFolder) -> None:
    """In plots/ and in clients/, where nothing is replaced whole; the run's own pictures go."""
    folder.plots.mkdir(exist_ok=True)
    for name in (*PICTURES, "mine.png", "audit.png"):
        (folder.plots / name).write_text(name)
    (folder.path / "clients" / "notes.txt").write_text("x")
    ran(configured(project, *LONGER[:1], "run.rounds=3"), folder.path, resume=True)
    assert sorted(path.name for path in folder.plots.iterdir()) == ["audit.png", "mine.png"]
    assert [path.name for path in (folder.path / "clients").iterdir()] == ["notes.txt"], "no readouts now"


def test_the_pictures_that_go_are_those_that_are_drawn(folder: RunFolder) -> None:
    from fedlora.runs.plots import plot_run

    assert {path.name for path in plot_run(folder)} <= set(PICTURES)


def test_uploads_of_rounds_that_are_played_again_are_looked_at_too(project: Path, tmp_path: Path) -> None:
    """checkpoint_every = 5: after a stop in round 2 both rounds are played again."""
    sets = ("run.rounds=3", "train.steps=1", "run.keep_uploads=all", "run.checkpoint_every=5")
    folder = ran(configured(project, *sets), tmp_path / "run", 2)
    (folder.uploads(2) / "mine.txt").write_text("x")
    assert "round-00002 holds 'mine.txt'" in refused(project, folder, *sets)
    (folder.uploads(2) / "mine.txt").unlink()
    assert ran(configured(project, *sets), folder.path, resume=True).finished()


@pytest.mark.quick(2)
@pytest.mark.parametrize("gone", [("adapter",), ("best",), ("clients/site-2",), PLACES], ids=str)
def test_adapters_that_are_gone_are_made_again(
    project: Path, whole: RunFolder, folder: RunFolder, main: Callable[..., Said], gone: tuple[str, ...]
) -> None:
    for name in gone:
        shutil.rmtree(folder.path / name)
    arguments = ("run", project / "config.toml", "--out", folder.path, "--resume")
    sets = [a for s in BASE for a in ("--set", s)]
    said = main(*arguments, *sets)
    assert said.code == 0 and "checkpoint of round 2; nothing" in said.err
    assert all(f"{name}/" in said.err for name in gone)
    assert written(folder) == written(whole)
    same_run(folder, whole)
    assert "nothing was trained now" in main(*arguments, *sets).err


def test_without_the_last_checkpoint_the_lack_is_an_error(
    project: Path, folder: RunFolder, main: Callable[..., Said]
) -> None:
    shutil.rmtree(folder.path / "adapter")
    for path in folder.checkpoints.glob("round-00002.*"):
        path.unlink()
    before = contents(folder.path)
    sets = [a for s in BASE for a in ("--set", s)]
    said = main("run", project / "config.toml", "--out", folder.path, "--resume", *sets)
    assert re.search("without adapter/, .*checkpoint of round 2", said.error())
    assert contents(folder.path) == before


def test_a_finished_run_without_states_is_not_trained_again(project: Path, folder: RunFolder) -> None:
    """Before: all rounds were played from the start, and the log was emptied, without a word."""
    shutil.rmtree(folder.checkpoints)
    before = contents(folder.path)
    with pytest.raises(CheckpointError, match=r"ended after 2 rounds, .*checkpoints/"):
        ran(configured(project, *LONGER), folder.path, resume=True)
    assert contents(folder.path) == before
