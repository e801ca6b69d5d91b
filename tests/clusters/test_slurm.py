"""A grid on a real Slurm of two nodes here: the driver and a node die, a time limit comes. Kind: end-to-end."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest

from clusters.slurm_cluster import Slurm, slurm, slurm_needed
from support.grids import COMMAND, environment, fedlora, in_the_middle, outcomes, write_grid
from support.machines import until

pytestmark = [pytest.mark.cluster, slurm_needed, pytest.mark.timeout(1500)]
PLACES = ("--results", "results", "--work-dir", "work")


def running(cluster: Slurm, work: Path) -> list[dict[str, str]]:
    """Tasks that run, once two runs are in the middle of their rounds."""
    return [job for job in cluster.jobs() if job["JobState"] == "RUNNING"] if in_the_middle(work) else []


def test_a_grid_ends_with_the_same_bits_though_its_driver_and_a_node_die_and_a_limit_comes(tmp_path: Path) -> None:
    """Four runs of a search and two that it decides. In the search the driver is killed, one node loses its power, and
    the other task is told that its time is over. Both are queued again; a second driver finds them in the queue."""
    write_grid(tmp_path)
    words = ["run", "two.toml", "--backend", "slurm", "--time", "20", *PLACES]
    with tempfile.TemporaryDirectory() as short, slurm(Path(short)) as cluster:
        conf = str(Path(short) / "slurm.conf")
        driver = subprocess.Popen([*COMMAND, *words], cwd=tmp_path, env={**environment(), "SLURM_CONF": conf})
        first = until(lambda: running(cluster, tmp_path / "work"), 300, "two in the middle")
        driver.kill()
        driver.wait()
        assert {job["NodeList"] for job in first} == {"n1", "n2"}, first
        cluster.tell_limit(first[1]["JobId"])
        cluster.kill_node(first[0]["NodeList"])
        hit = {job["JobId"] for job in first}
        until(lambda: all(job["Restarts"] == "1" for job in cluster.jobs() if job["JobId"] in hit), 120, "queued again")
        cluster.begin_node(first[0]["NodeList"])
        fedlora(tmp_path, *words, SLURM_CONF=conf)
        assert len(cluster.jobs()) == 6, "no run was submitted twice"
    fedlora(tmp_path, "run", "two.toml", "--results", "alone", "--work-dir", "calm")
    calm, after = outcomes(tmp_path / "alone", tmp_path / "calm"), outcomes(tmp_path / "results", tmp_path / "work")
    assert len(calm) == 6 and after == calm
