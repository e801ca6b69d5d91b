"""A grid on a real Ray cluster of two nodes on this machine, one of which dies. Kind: end-to-end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from support.grids import COMMAND, GRID, fedlora, in_the_middle, outcomes, write_grid
from support.machines import until

pytestmark = [
    pytest.mark.cluster, pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray (pip install 'fedlora[ray]')"),
]  # fmt: skip


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head and another node, of one core each. Their workers find what this process finds."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.other = made.add_node(num_cpus=1)
    monkeypatch.setenv("RAY_ADDRESS", made.address)
    yield made
    made.shutdown()


def test_a_grid_is_begun_if_it_fits_and_nothing_is_lost_if_a_node_dies(tmp_path: Path, cluster: Any) -> None:
    """A run of more cores than a node has is refused, instead of waiting for ever. Then four runs of a search and two
    that it decides. While two runs are in the middle, one on each node, a node is killed; its run goes on, on the other
    one. All end with the bits of a calm run."""
    write_grid(tmp_path, GRID.replace("threads = 1", "threads = 3"))
    why = fedlora(tmp_path, "run", "two.toml", "--backend", "ray", code=2)
    assert "3 cores and 0 GPUs" in why and "2 nodes" in why
    (tmp_path / "two.toml").write_text(GRID)
    words = [*COMMAND, "run", "two.toml", "--backend", "ray", "--results", "results", "--work-dir", "work"]
    with (tmp_path / "said").open("w") as said:
        driver = subprocess.Popen(words, cwd=tmp_path, stderr=said)
        two = until(lambda: driver.poll() is None and in_the_middle(tmp_path / "work"), 300, "two runs in the middle")
        cluster.remove_node(cluster.other, allow_graceful=False)
        assert driver.wait(600) == 0, (tmp_path / "said").read_text()
    assert len(two) == 2
    fedlora(tmp_path, "run", "two.toml", "--results", "alone", "--work-dir", "calm")
    calm, after = outcomes(tmp_path / "alone", tmp_path / "calm"), outcomes(tmp_path / "results", tmp_path / "work")
    assert len(calm) == 6 and after == calm
