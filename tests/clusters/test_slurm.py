"""A grid on a real Slurm of two nodes on this machine: a node dies, a time limit comes. Kind: end-to-end."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from support.grids import fedlora, in_the_middle, told, write_grid
from support.slurm_cluster import Slurm, slurm, slurm_needed, until

pytestmark = [pytest.mark.cluster, slurm_needed, pytest.mark.timeout(1500)]


def running(cluster: Slurm, work: Path) -> list[dict[str, str]]:
    """Tasks that run, once two runs are in the middle of their rounds."""
    return [job for job in cluster.jobs() if job["JobState"] == "RUNNING"] if in_the_middle(work) else []


def test_a_grid_ends_with_the_same_bits_though_a_node_dies_and_a_limit_comes(tmp_path: Path) -> None:
    """Four runs of a search and two that it decides, as two tasks. In the first wave one node loses its power, and the
    other task is told that its time is over. Both are queued again, and end as if nothing had been."""
    write_grid(tmp_path)
    options = ["--shards", "2", "--time", "20", "--results", "results", "--work", "work"]
    script = tmp_path / "work" / "slurm" / "two-mini.sh"
    assert f"bash {script}" in fedlora(tmp_path, "sbatch", "two.toml", *options)
    with tempfile.TemporaryDirectory() as short, slurm(Path(short)) as cluster:
        assert cluster.call("bash", script).startswith("Submitted batch job ")
        first = until(lambda: running(cluster, tmp_path / "work"), 300, "two in the middle")
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
