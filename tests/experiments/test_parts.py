"""Which code made which part of a run: noted before it computes. Kinds: oracle (by hand), hostile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedlora.errors import CheckpointError
from fedlora.experiments.origin import PARTS, note, noted
from fedlora.runs.folder import RunFolder

A, B = ({"id": letter * 40, "clean": clean} for letter, clean in (("a", True), ("b", False)))


def manifest(commit: object) -> dict[str, Any]:
    return {"commit": commit, "device": "cpu", "threads": 1, "config_digest": "x", "data": {}}


def begun(path: Path, commit: object, rounds: int, *, kept: bool) -> RunFolder:
    """A run folder with so many rounds in its log; kept: the last of them has a checkpoint."""
    folder = RunFolder(path)
    folder.create("{}", manifest(commit))
    link = ""
    for k in range(rounds):
        link = folder.append_metrics({"round": k + 1}, link)
    if kept:
        folder.checkpoints.mkdir()
        (folder.checkpoints / f"round-{rounds:05d}.{'0' * 16}.safetensors").write_bytes(b"")
    return folder


def told(folder: RunFolder) -> list[tuple[int, str | None]]:
    return [(part["after"], part["commit"] and part["commit"]["id"][0]) for part in noted(folder)]


def test_a_run_that_goes_on_with_other_code_has_both(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    note(folder, manifest(A))
    assert told(folder) == [(0, "a")] and noted(folder)[0]["machine"]["device"] == "cpu"
    begun(folder.path, A, 2, kept=True)
    note(folder, manifest(A))
    assert told(folder) == [(0, "a")], "the same code on the same machine is one part"
    note(folder, manifest(B))
    note(folder, manifest(None))
    assert told(folder) == [(0, "a"), (2, "b"), (2, None)]


def test_what_was_not_kept_is_done_again_and_its_code_made_nothing(tmp_path: Path) -> None:
    """Two rounds in the log and no checkpoint: all is computed anew."""
    folder = RunFolder(tmp_path / "run")
    note(folder, manifest(B))
    begun(folder.path, B, 2, kept=False)
    note(folder, manifest(A))
    assert told(folder) == [(0, "a")]


def test_a_run_of_an_older_version_has_the_commit_of_its_manifest(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run", A, 3, kept=True)
    note(folder, manifest(B))
    assert told(folder) == [(0, "a"), (3, "b")] and noted(folder)[0]["machine"] is None


@pytest.mark.parametrize("content", ["{}", '{"parts": []}', '{"parts": [1]}', "[", '{"parts": [{"after": 0}]}'])
def test_damaged_notes_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / PARTS).write_text(content)
    with pytest.raises(CheckpointError, match=PARTS):
        noted(RunFolder(tmp_path))
    assert json.dumps(A)
