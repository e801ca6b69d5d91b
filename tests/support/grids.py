"""A small grid for clusters: what it is, how it is run, what came out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from fedlora.experiments.result import Result
from fedlora.experiments.store import read_results
from support.training_data import classification, rows, save_encoder

GRID = """
title = "Two"
question = "?"
[run.model]
path = "model"
[run.data]
train = "mine.jsonl"
max_length = 16
[run.clients]
count = 2
ranks = [2]
partition = "iid"
[run.train]
steps = 1
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


def fedlora(folder: Path, *words: str, code: int = 0) -> str:
    """What `fedlora experiment WORDS` said, called in the folder."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "fedlora", "experiment", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stderr


def in_the_middle(work: Path) -> list[Path]:
    """Runs that have made some rounds and are not done; none before there are two."""
    begun = [path for path in work.glob("runs/*/metrics.jsonl") if not (path.parent / "summary.json").exists()]
    found = [path.parent for path in begun if len(path.read_text().splitlines()) > 5]
    return found if len(found) > 1 else []


def told(results: Path, work: Path) -> dict[str, tuple[object, bytes]]:
    """Digest -> what the run came to: all numbers of its result, and the bits of its adapter."""
    found: dict[str, Result] = read_results(results)
    adapter = "adapter/adapter_model.safetensors"
    return {
        digest: ((one.history, one.test, one.best_round), (work / "runs" / digest / adapter).read_bytes())
        for digest, one in found.items()
    }
