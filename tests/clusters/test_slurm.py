"""A grid on a real Slurm of two nodes on this machine: a node dies, a time limit comes. Kind: end-to-end."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fedlora.experiments.result import Result
from fedlora.experiments.store import read_results
from support.slurm_cluster import Slurm, slurm, slurm_needed, until
from support.training_data import classification, rows, save_encoder

pytestmark = [pytest.mark.cluster, slurm_needed, pytest.mark.timeout(1500)]

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


def fedlora(folder: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "fedlora", "experiment", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def running(cluster: Slurm, work: Path) -> list[dict[str, str]]:
    """Tasks that run, once two runs are in the middle of their rounds."""
    middle = [path for path in work.glob("runs/*/metrics.jsonl") if not (path.parent / "summary.json").exists()]
    if sum(len(path.read_text().splitlines()) > 5 for path in middle) < 2:
        return []
    return [job for job in cluster.jobs() if job["JobState"] == "RUNNING"]


def told(results: Path, work: Path) -> dict[str, tuple[object, bytes]]:
    """Digest -> what the run came to: all numbers of its result, and the bits of its adapter."""
    found: dict[str, Result] = {**read_results(results), **read_results(work / "unclean")}
    adapter = "adapter/adapter_model.safetensors"
    return {
        digest: ((one.history, one.test, one.best_round), (work / "runs" / digest / adapter).read_bytes())
        for digest, one in found.items()
    }


def test_a_grid_ends_with_the_same_bits_though_a_node_dies_and_a_limit_comes(tmp_path: Path) -> None:
    """Four runs of a search and two that it decides, as two tasks. In the first wave one node loses its power, and the
    other task is told that its time is over. Both are queued again, and end as if nothing had been."""
    save_encoder(tmp_path / "model")
    (tmp_path / "mine.jsonl").write_text(rows(classification(60, 0)))
    (tmp_path / "two.toml").write_text(GRID)
    options = ["--shards", "2", "--time", "20", "--results", "results", "--work", "work"]
    said = fedlora(tmp_path, "sbatch", "two.toml", *options)
    script = tmp_path / "work" / "slurm" / "two-mini.sh"
    assert said.endswith(f"2 tasks for the search, then the runs that it decides. Submit it by: bash {script}\n")
    with tempfile.TemporaryDirectory() as short, slurm(Path(short)) as cluster:
        assert cluster.call("bash", script).startswith("Submitted batch job ")
        first = until(lambda: running(cluster, tmp_path / "work"), 300, "two runs are in the middle")
        assert {job["NodeList"] for job in first} == {"n1", "n2"}, first
        cluster.kill_node(first[0]["NodeList"])
        cluster.call("scancel", "--signal=USR1", "--batch", first[1]["JobId"])
        hit = {job["JobId"] for job in first}
        until(lambda: all(job["Restarts"] == "1" for job in cluster.jobs() if job["JobId"] in hit), 120, "queued again")
        cluster.begin_node(first[0]["NodeList"])
        until(lambda: {job["JobState"] for job in cluster.jobs()} == {"COMPLETED"}, 900, "all tasks are completed")
        assert len(cluster.jobs()) == 4, "two waves of two tasks"
    fedlora(tmp_path, "run", "two.toml", "--results", "alone", "--work", "calm")
    calm, after = told(tmp_path / "alone", tmp_path / "calm"), told(tmp_path / "results", tmp_path / "work")
    assert len(calm) == 6 and after == calm
