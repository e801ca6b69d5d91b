"""A run's folder: what it is written into, and what a log must be. Kind of evidence: contract (a refusal changes no
byte)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from fedlora.errors import CheckpointError, ConfigError
from fedlora.runs.folder import RunFolder
from support.command_line import Said
from support.projects import contents

MANIFEST = json.dumps({"config_digest": "", "data": {"label_names": []}})
FOREIGN: dict[str, Mapping[str, str]] = {
    "a model": {"config.json": '{"model_type": "bert"}'},
    "a run without its manifest": {"config.json": "{}", "metrics.jsonl": "{}\n"},
    "a manifest of something else": {"manifest.json": '{"name": "an app"}'},
}
FREE: dict[str, Mapping[str, str]] = {
    "empty": {},
    "killed within its manifest": {".manifest.json.0123456789ab.part": "{"},
    "killed before its config": {"manifest.json": MANIFEST},
    "a private one, killed early": {"private/run.json": "{}"},
    "a run": {"manifest.json": MANIFEST, "config.json": "{}", "notes.txt": "of the owner"},
}


def laid(root: Path, files: Mapping[str, str]) -> Path:
    root.mkdir()
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize("files", FOREIGN.values(), ids=FOREIGN)
def test_a_folder_of_others_is_refused_and_stays_as_it_was(tmp_path: Path, files: Mapping[str, str]) -> None:
    folder = RunFolder(laid(tmp_path / "out", files))
    before = contents(tmp_path)
    with pytest.raises((ConfigError, CheckpointError), match="--out"):
        folder.check_place(resume=True)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("files", FREE.values(), ids=FREE)
def test_what_a_killed_start_left_and_a_run_are_written_to(tmp_path: Path, files: Mapping[str, str]) -> None:
    folder = RunFolder(laid(tmp_path / "out", files))
    folder.check_place(resume=True)
    with folder.held():
        folder.create("{}", json.loads(MANIFEST))
    assert folder.exists() and not folder.finished()


def test_a_place_for_no_run_is_told_before_anything_is_read(
    project: Path, tmp_path: Path, main: Callable[..., Said]
) -> None:
    """A model that is not there would be told first."""
    laid(tmp_path / "others", {"thesis.txt": "years"})
    said = main("run", project / "config.toml", "--out", tmp_path / "others", "--set", "model.name=nowhere")
    assert "the first is 'thesis.txt'" in said.complaint()


def test_half_a_line_does_not_count_and_lines_after_the_state_are_dropped(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"round": 1}\n{"round": 2}\n{"rou')
    folder = RunFolder(tmp_path)
    assert folder.metrics() == [{"round": 1}, {"round": 2}]
    assert folder.rewind(1) == folder.metrics() == [{"round": 1}]
    (tmp_path / "metrics.jsonl").write_text('{"round": 1}\n{"rou\n{"round": 3}\n')
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl cannot be read"):
        folder.metrics()
    (tmp_path / "metrics.jsonl").write_text('{"round": 1}\n')
    with pytest.raises(CheckpointError, match=r"1 round, .* checkpoint of round 2"):
        folder.rewind(2)
