"""A secret draw, and a reader of all that a run publishes. Kind of evidence: attack. One client is slow: whoever learns
when rounds ended, or how long they took, learns where it was drawn. The reader has the contents of every file that may
be handed out, and the ledger; he looks for any time in them, and for any number of a round's line that is larger, or
smaller, just where the slow client was.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from fedlora.runs.reading import flat
from fedlora.server import private_round
from fedlora.training import LocalTrainer
from support.command_line import invoke, options
from support.projects import make_private_project

THERE = [False, True, False, True, False]  # the slow client, by round
SLOW = 0.4  # seconds
ISO = re.compile(r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?")
EPOCH = re.compile(r"(?<!\d)\d{10}(?:\d{3}|\d{6}|\d{9})?(?!\d)")


def published(run: Path, ledger: Path, into: Path) -> Path:
    """What may be handed out, as `cp` copies it: times of files are the copy's."""
    into.mkdir()
    for entry in sorted(run.iterdir()):
        if entry.name not in ("private", "checkpoints"):
            (shutil.copytree if entry.is_dir() else shutil.copyfile)(entry, into / entry.name)
    shutil.copyfile(ledger, into / ledger.name)
    return into


def moments(folder: Path) -> Iterator[tuple[str, float]]:
    """(where, seconds since 1970) of whatever may be a time: in words, and as a number in any unit."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        text = path.read_bytes().decode(errors="replace")
        for found in ISO.finditer(text):
            with suppress(ValueError):
                yield f"{path.name}: {found[0]}", datetime.fromisoformat(found[0]).timestamp()
        for found in EPOCH.finditer(text):
            yield f"{path.name}: {found[0]}", float(found[0][:10])


def test_nothing_that_is_published_tells_where_the_slow_client_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawn: None
) -> None:
    pytest.importorskip("opendp")
    pytest.importorskip("dp_accounting")
    config = make_private_project(tmp_path / "project") / "config.toml"
    draws, real = iter(THERE), LocalTrainer.train

    def train(trainer: Any, download: Any, *args: Any, **more: Any) -> Any:
        if download.client.id == "site-1":
            time.sleep(SLOW)
        return real(trainer, download, *args, **more)

    monkeypatch.setattr(LocalTrainer, "train", train)
    monkeypatch.setattr(
        private_round, "poisson_sample", lambda *_: ["site-1", "site-2"] if next(draws) else ["site-2", "site-3"]
    )
    began = time.time()
    sets = (f"run.rounds={len(THERE)}", "run.participation=0.5", f"privacy.ledger={tmp_path / 'ledger.jsonl'}")
    invoke("run", config, *options(sets), "--out", tmp_path / "run")
    ended = time.time()
    assert ended - began > sum(THERE) * SLOW and next(draws, None) is None
    folder = published(tmp_path / "run", tmp_path / "ledger.jsonl", tmp_path / "handed out")
    assert {"adapter", "best", "plots", "metrics.jsonl", "ledger.jsonl"} <= {path.name for path in folder.iterdir()}
    assert not [where for where, when in moments(folder) if began - 86_400 < when < ended + 86_400]
    for name in ("metrics.jsonl", "ledger.jsonl"):
        lines = [json.loads(text) for text in (folder / name).read_text().splitlines()]
        lines = [flat(line) for line in lines if line.get("kind", "event") == "event"]
        assert len(lines) == len(THERE)
        for key in (key for key, value in lines[0].items() if isinstance(value, int | float) and key[:8] != "metrics."):
            there = [line[key] for line, was in zip(lines, THERE, strict=True) if was]
            away = [line[key] for line, was in zip(lines, THERE, strict=True) if not was]
            assert min(there) <= max(away) and min(away) <= max(there), (name, key)
