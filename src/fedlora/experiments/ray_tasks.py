"""Runs on a Ray cluster that stands already: a task for each, with the cores, GPUs and memory that it asks for. Folders
must be shared by the nodes. If a node dies, Ray begins its tasks again on another one, where they resume."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Sequence
from typing import Any

from fedlora.errors import ConfigError, counted
from fedlora.experiments.grid import Planned
from fedlora.experiments.here import LOOK, TRIES, Ended
from fedlora.experiments.slurm import cores_of
from fedlora.experiments.work import Work, begin

log = logging.getLogger(__name__)
_UNITS = {"M": 2**20, "G": 2**30, "T": 2**40}


def ray_tasks(runs: Sequence[Planned], work: Work, address: str | None, gpus: int | None, memory: str | None) -> Ended:
    """The runs, as many at a time as the cluster has room for.

    Args:
        address: of the cluster, as `ray.init` takes it; None: the one of this machine, or of RAY_ADDRESS. gpus: of each
            run; None: one for each run that is not for the CPU, if the cluster has GPUs. memory: of each run, such as
            "16G"; None: Ray does not count it.

    Raises:
        ConfigError: no Ray, no such cluster, or none of its nodes has room for a run.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError("--backend ray needs Ray: pip install 'fedlora[ray]'.") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of what Ray will do one day
            ray.init(address or "auto", log_to_driver=False, logging_level=logging.WARNING, ignore_reinit_error=True)
    except (ConnectionError, ValueError) as error:
        raise ConfigError(
            f"no Ray cluster answers at {address or 'this machine or RAY_ADDRESS'}: {str(error).splitlines()[0]} Start "
            f"one (ray start --head), or name its --address."
        ) from error
    if gpus is None:
        on_gpu = any(run.config.model.device != "cpu" for run in runs)
        gpus = int(on_gpu and any(node.get("GPU", 0) for node in _nodes(ray)))
    asked = {"CPU": max(cores_of(run) for run in runs), "GPU": gpus, "memory": _bytes(memory)}
    if not _room(ray, asked):
        raise ConfigError(
            f"a run asks for {counted(asked['CPU'], 'core')}, {counted(gpus, 'GPU')} and {asked['memory'] / 2**30:g} "
            f"GB of memory, and none of the cluster's {counted(len(_nodes(ray)), 'node')} has all that. Ask for less "
            f"(run.threads, run.workers, --gpus, --memory), or add a node."
        )
    how = {"num_cpus": asked["CPU"], "num_gpus": gpus, "memory": asked["memory"] or None, "max_retries": TRIES}
    task = ray.remote(run_of_fedlora).options(**how)
    left = {task.remote(os.getcwd(), work, run): run for run in runs}
    told = False
    try:
        while left:
            done, _ = ray.wait(list(left), num_returns=1, timeout=LOOK)
            for one in done:
                try:
                    why = ray.get(one)
                except ray.exceptions.RayError as error:
                    why = f"{type(error).__name__}: {error}".splitlines()[0]
                yield left.pop(one), why
            if not done:
                if not told and not _room(ray, asked):
                    log.warning("%s wait: no living node has room for one", counted(len(left), "run"))
                    told = True
                yield None
    finally:
        for one in left:
            ray.cancel(one, force=True)


def run_of_fedlora(folder: str, work: Work, run: Planned) -> str | None:
    """In the process of a task, which Ray calls by this name. folder: where relative paths start."""
    os.chdir(folder)
    begin()
    return work(run)


def _nodes(ray: Any) -> list[dict[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _room(ray: Any, asked: dict[str, int]) -> bool:
    return any(all(node.get(name, 0) >= number for name, number in asked.items()) for node in _nodes(ray))


def _bytes(memory: str | None) -> int:
    if memory is None:
        return 0
    if not (match := re.fullmatch(r"(\d+)([MGT])", memory)):
        raise ConfigError(f"--memory takes a number and M, G or T, such as 16G; got {memory!r}.")
    return int(match[1]) * _UNITS[match[2]]
