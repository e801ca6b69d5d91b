"""A small grid for clusters: what it is, how it is run, what came out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from fedlora.experiments.results import read
from support.training_data import classification, rows, save_encoder

GRID = """
title = "Two"
[run.model]
name = "model"
[run.data]
train = "mine.jsonl"
max_length = 16
[run.clients]
count = 2
ranks = [2]
partition = "iid"
[run.train]
max_steps = 1
batch_size = 4
[run.run]
rounds = 150
threads = 1
[axes.method]
FedIT = { "method.name" = "fedit" }
GLoRA = { "method.name" = "glora" }
[tune]
values = [1e-3, 1e-2]
seeds = [7]
[profiles.mini]
seeds = [0]
"""


def write_grid(folder: Path, grid: str = GRID) -> None:
    save_encoder(folder / "model")
    (folder / "mine.jsonl").write_text(rows(classification(60, 0)))
    (folder / "two.toml").write_text(grid)


COMMAND = [sys.executable, "-m", "fedlora", "experiment"]


def environment() -> dict[str, str]:
    """In which a process finds what this one finds."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def fedlora(folder: Path, *words: str, code: int = 0, **more: str) -> str:
    """What `fedlora experiment WORDS` said, called in the folder. more: of its environment."""
    done = subprocess.run([*COMMAND, *words], cwd=folder, env={**environment(), **more}, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stderr


def in_the_middle(work: Path) -> list[Path]:
    """Runs that have made some rounds and are not done; none before there are two."""
    begun = [path for path in work.glob("runs/*/metrics.jsonl") if not (path.parent / "summary.json").exists()]
    found = [path.parent for path in begun if len(path.read_text().splitlines()) > 5]
    return found if len(found) > 1 else []


def outcomes(results: Path, work: Path) -> dict[str, tuple[object, bytes]]:
    """Digest -> what the run came to: all numbers of its result, and the bits of its adapter."""
    adapter = "adapter/adapter_model.safetensors"
    return {
        digest: (
            [line[key] for key in ("history", "test", "best_round")],
            (work / "runs" / digest / adapter).read_bytes(),
        )
        for digest, line in read(results / "two.jsonl").items()
    }
