"""A run is not written among files that are no run's. Kind of evidence: contract (a refusal changes no byte)."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from fedlora.errors import ConfigError
from fedlora.runs.execution import execute
from fedlora.runs.folder import RunFolder
from fedlora.runs.preparation import prepare
from support.command_line import Said
from support.known_warnings import FUTURE_NAMES, NOT_ON_THE_HUB
from support.projects import configured

pytestmark = [FUTURE_NAMES, NOT_ON_THE_HUB]

OURS = json.dumps({"model": {}, "data": {}, "method": {}, "run": {}})

FOREIGN: dict[str, tuple[Mapping[str, str], str]] = {
    "a config of something else": ({"config.json": '{"mine": 1}'}, "1 entry, the first is 'config.json'"),
    "a model's config": ({"config.json": '{"model_type": "bert"}'}, "'config.json'"),
    "a config that is no JSON": ({"config.json": "mine"}, "'config.json'"),
    "a config that is a list": ({"config.json": "[]"}, "'config.json'"),
    "a config that nests deep": ({"config.json": "[" * 200_000}, "'config.json'"),
    "a config of a run and a file": ({"config.json": OURS, "thesis.txt": "years"}, "2 entries, the first is 'thesis.t"),
    "a summary": ({"summary.json": "{}"}, "'summary.json'"),
    "an adapter": ({"adapter/adapter_config.json": "{}", "adapter/w.bin": "1"}, "'adapter'"),
    "a best one": ({"best/model.bin": "1"}, "'best'"),
    "pictures": ({"plots/holiday.png": "1"}, "'plots'"),
    "clients": ({"clients/acme.txt": "1"}, "'clients'"),
    "uploads": ({"uploads/mine": "1"}, "'uploads'"),
    "checkpoints": ({"checkpoints/round-00001.pt": "1"}, "'checkpoints'"),
    "private files": ({"private/diary": "1"}, "'private'"),
    "private files of a run's names and others": ({"private/run.json": "{}", "private/diary": "1"}, "'private'"),
    "the log of a run whose manifest is gone": ({"config.json": OURS, "metrics.jsonl": "{}\n"}, "'metrics.jsonl'"),
    "a hidden file": ({".git/HEAD": "ref"}, "'.git'"),
    "half a file of another name": ({".thesis.txt.0123456789ab.part": "1"}, "thesis"),
    "a name with a control sequence": ({"\x1b[31m": "1"}, "'\\x1b[31m'"),
}  # fmt: skip


def laid(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def everything(root: Path) -> dict[str, bytes | str | None]:
    """Path -> its bytes; of a link where it leads, of a folder None."""
    return {
        str(path.relative_to(root)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        if path.is_file() else None
        for path in root.rglob("*")
    }  # fmt: skip


def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def loads(*_: object) -> None:
        raise AssertionError("model and data were read first")

    monkeypatch.setattr("fedlora.runs.preparation.prepare", loads)


@pytest.mark.parametrize("resume", [[], ["--resume"]], ids=["fresh", "resumed"])
@pytest.mark.parametrize(("files", "says"), FOREIGN.values(), ids=FOREIGN)
def test_a_folder_of_others_is_refused_before_anything_is_read_and_stays_as_it_was(
    project: Path, tmp_path: Path, main: Callable[..., Said], monkeypatch: pytest.MonkeyPatch,
    files: Mapping[str, str], says: str, resume: list[str],
) -> None:  # fmt: skip
    unloaded(monkeypatch)
    laid(tmp_path / "out", files)
    before = everything(tmp_path)
    said = main("run", project / "config.toml", "--out", tmp_path / "out", *resume)
    assert "holds no run" in said.complaint()
    assert says in said.complaint() and "Nothing was written" in said.complaint()
    assert everything(tmp_path) == before


@pytest.mark.parametrize("files", [files for files, _ in FOREIGN.values()], ids=FOREIGN)
def test_the_library_refuses_it_as_well(tmp_path: Path, files: Mapping[str, str]) -> None:
    folder = RunFolder(laid(tmp_path / "out", files))
    before = everything(tmp_path)
    with pytest.raises(ConfigError, match="holds no run"):
        folder.create("{}", {})
    with pytest.raises(ConfigError, match="holds no run"), folder.held():
        pass
    assert everything(tmp_path) == before


def test_the_rounds_refuse_it_too(project: Path, tmp_path: Path) -> None:
    laid(tmp_path / "out", {"adapter/w.bin": "1"})
    with pytest.raises(ConfigError, match="holds no run"):
        next(iter(execute(prepare(configured(project, "run.rounds=1")), RunFolder(tmp_path / "out"))))
    assert everything(tmp_path) == {"out": None, "out/adapter": None, "out/adapter/w.bin": b"1"}


def test_the_model_and_the_current_directory_are_no_place_for_a_run(
    project: Path, tmp_path: Path, main: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = shutil.copytree(project, tmp_path / "project")
    monkeypatch.chdir(own)
    before = everything(tmp_path)
    for out in ("model", "", ".", own):
        assert "holds no run" in main("run", "config.toml", "--out", out).complaint()
    assert everything(tmp_path) == before


def test_what_cannot_be_made_is_said_before_anything_is_read(
    project: Path, tmp_path: Path, main: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    unloaded(monkeypatch)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    before = everything(tmp_path)
    for out, says in {
        tmp_path / "file": "is a file; ",
        tmp_path / "link": "is a link; ",
        tmp_path / "file" / "run": "cannot be written",
        tmp_path / ("a" * 300): "File name too long",
    }.items():
        assert says in main("run", project / "config.toml", "--out", out).complaint()
    assert everything(tmp_path) == before


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o500)
    for place in (tmp_path / "run", tmp_path / "run" / "deeper"):
        with pytest.raises(ConfigError, match="cannot be written"):
            RunFolder(place).check_place()


FREE: dict[str, Mapping[str, str]] = {
    "empty": {},
    "killed before its manifest": {"config.json": OURS},
    "killed within its manifest": {"config.json": OURS, ".manifest.json.0123456789ab.part": "{"},
    "killed within its config": {".config.json.0123456789ab.part": "{"},
    "a private one, killed early": {"private/.content.json.0123456789ab.part": "{", "private/run.json": "{}"},
    "a private one, killed late": {"private/run.json": "{}", "private/content.json": "{}", "config.json": OURS},
    "a run": {"manifest.json": "{}", "notes.txt": "of the owner"},
}


@pytest.mark.parametrize("files", FREE.values(), ids=FREE)
def test_what_a_killed_start_left_and_a_run_are_written_to(tmp_path: Path, files: Mapping[str, str]) -> None:
    (tmp_path / "out").mkdir()
    folder = RunFolder(laid(tmp_path / "out", files))
    folder.check_place()
    folder.create(OURS, {"config_digest": "", "data": {}})
    assert folder.exists()


def test_a_link_to_an_empty_folder_is_one(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to("disk")
    RunFolder(tmp_path / "run").create("{}", {})
    assert (tmp_path / "disk" / "manifest.json").is_file()
