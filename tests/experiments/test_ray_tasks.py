"""`experiment run --on ray` without Ray: what is refused, and what a dead worker is. tests/clusters has a real one."""

from __future__ import annotations

import os
import sys
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import SimpleNamespace as Space
from typing import Any

import pytest

from fedlora.errors import ConfigError
from fedlora.experiments.ray_tasks import RayTask, ray_tasks
from support.command_line import invoke
from support.grids import GRID


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--address", "a:1"], "--address is for --on ray"),
        (["--memory", "1G"], "--memory is for --on ray"),
        (["--on", "ray", "--workers", "2"], "--workers"),
    ],
)
def test_options_of_the_other_place_are_refused(tmp_path: Path, options: list[str], why: str) -> None:
    (tmp_path / "two.toml").write_text(GRID)
    refused = invoke("experiment", "run", tmp_path / "two.toml", "--work", tmp_path, *options, code=1)
    assert isinstance(refused.exception, ConfigError) and why in str(refused.exception)


def run(device: str = "auto", threads: int = 2) -> Any:
    return Space(config=Space(model=Space(device=device), run=Space(workers=None, threads=threads)))


class WorkerCrashedError(Exception):
    """Ray's, by its name."""


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in of a cluster with two nodes, one with GPUs. Tasks end at once; `asked` has what they asked for."""
    said = Space(asked=[], error=None)

    def options(function: Any, **how: Any) -> Any:
        def remote(*given: Any) -> Any:
            said.asked.append(how)
            future: Future[Any] = Future()
            if said.error is None:
                future.set_result(function(*given))
            else:
                future.set_exception(said.error)
            return Space(future=lambda: future)

        return Space(remote=remote)

    nodes = [{"CPU": 8.0, "memory": 8.0 * 2**30}, {"CPU": 4.0, "memory": 4.0 * 2**30, "GPU": 2.0}]
    said.is_initialized = lambda: True
    said.nodes = lambda: [{"Alive": True, "Resources": each} for each in nodes]
    said.remote = lambda function: Space(options=lambda **how: options(function, **how))
    monkeypatch.setitem(sys.modules, "ray", said)
    return said


@pytest.mark.parametrize(
    ("runs", "gpus", "memory", "why"),
    [
        ([run(threads=9)], None, None, "9 cores, 1 GPU "),
        ([run()], 3, None, "2 cores, 3 GPUs"),
        ([run()], None, "5G", "1 GPU and 5 GB"),
        ([run()], None, "5 GB", "16G; got '5 GB'"),
    ],
)
def test_what_no_node_has_is_refused(ray: Any, runs: list[Any], gpus: int | None, memory: str | None, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        ray_tasks(runs, None, gpus, memory)


@pytest.mark.parametrize(("device", "gpus"), [("auto", 1), ("cpu", 0)])
def test_a_run_asks_for_its_threads_a_gpu_and_memory(ray: Any, device: str, gpus: int) -> None:
    (slot, *_) = ray_tasks([run(device)], None, None, "2G")
    assert slot.start(abs, -3).result() == 3
    assert ray.asked == [{"num_cpus": 2, "num_gpus": gpus, "memory": 2 * 2**30, "max_retries": 0}]


def test_a_dead_worker_is_what_a_dead_process_is(ray: Any) -> None:
    """So the run is tried again, and its second death is the machine's failure, not its own."""
    for error, kind in ((WorkerCrashedError("gone"), BrokenProcessPool), (ValueError("no"), ValueError)):
        ray.error = error
        found = RayTask({"CPU": 1, "GPU": 0, "memory": 0}).start(os.fspath, ".")
        assert type(found.exception()) is kind


def test_without_ray_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"fedlora\[ray\]"):
        ray_tasks([run()], None, None, None)
