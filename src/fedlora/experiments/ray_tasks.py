"""A grid on a Ray cluster that runs already: a task for each run, with the cores, GPUs and memory that it asks for.

Folders must be shared by the nodes. The driver, which is this process, has the runs (`leases`): if a node dies, their
tasks begin again on another one, and resume.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from fedlora.errors import ConfigError, counted
from fedlora.experiments.gpus import begin
from fedlora.experiments.plan import PlannedRun
from fedlora.experiments.slurm import cores_of

T = TypeVar("T")
R = TypeVar("R")
_AT_ONCE = 200  # tasks given to Ray, which runs those that it has room for; each has signs of life to give
_UNITS = {"M": 2**20, "G": 2**30, "T": 2**40}


def ray_tasks(
    runs: Sequence[PlannedRun], address: str | None, gpus: int | None, memory: str | None
) -> Sequence[RayTask]:
    """Places for the runs.

    Args:
        address: of the cluster, as `ray.init` takes it; None: the one of this machine, or of RAY_ADDRESS.
        gpus: of each run; None: one for each run that is not for the CPU, if the cluster has GPUs.
        memory: of each run, such as "16G"; None: Ray does not count it.

    Raises:
        ConfigError: no Ray, no such cluster, or none of its nodes has room for a run.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError("--on ray needs Ray: pip install 'fedlora[ray]'.") from error
    try:
        if not ray.is_initialized():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of what Ray will do one day
                ray.init(address or "auto", log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, ValueError) as error:
        raise ConfigError(
            f"no Ray cluster answers at {address or 'this machine or RAY_ADDRESS'}: {str(error).splitlines()[0]} Start "
            f"one (ray start --head), or name its --address."
        ) from error
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if gpus is None:
        on_gpu = any(run.config.model.device != "cpu" for run in runs)
        gpus = int(on_gpu and any(node.get("GPU", 0) for node in nodes))
    asked = {"CPU": max(cores_of(run.config) for run in runs), "GPU": gpus, "memory": _bytes(memory)}
    if not any(all(node.get(name, 0) >= number for name, number in asked.items()) for node in nodes):
        raise ConfigError(
            f"a run asks for {counted(asked['CPU'], 'core')}, {counted(gpus, 'GPU')} and {asked['memory'] / 2**30:g} "
            f"GB of memory, and none of the cluster's {counted(len(nodes), 'node')} has all that. Ask for less "
            f"(run.threads, run.workers, --gpus, --memory), or add a node."
        )
    return [RayTask(asked) for _ in runs[:_AT_ONCE]]


def _bytes(memory: str | None) -> int:
    if memory is None:
        return 0
    if not (match := re.fullmatch(r"(\d+)([MGT])", memory)):
        raise ConfigError(f"--memory takes a number and M, G or T, such as 16G; got {memory!r}.")
    return int(match[1]) * _UNITS[match[2]]


class RayTask:
    """A slot (`pool.Slot`). asked: resource -> how much of it a task has."""

    def __init__(self, asked: dict[str, int]) -> None:
        self._asked = asked
        self._task: Any = None
        self.idle = True

    def start(self, function: Callable[[T], R], task: T) -> Future[R]:
        import ray

        self.idle = False
        how = {"num_cpus": self._asked["CPU"], "num_gpus": self._asked["GPU"], "memory": self._asked["memory"] or None}
        work = ray.remote(_begun).options(**how, max_retries=0)  # `pool` tries again
        self._task = work.remote(os.getcwd(), function, task)
        found: Future[R] = Future()
        self._task.future().add_done_callback(lambda done: _pass_on(done, found))
        return found

    def end(self) -> None:
        """End the task, if it runs."""
        import ray

        if not self.idle:
            ray.cancel(self._task, force=True)


def _begun(folder: str, function: Callable[[T], R], task: T) -> R:
    """In the process of a task. folder: where relative paths start."""
    os.chdir(folder)
    begin("")
    return function(task)


def _pass_on(done: Future[R], found: Future[R]) -> None:
    """The result; a dead worker or node is what a dead process is on one machine."""
    error = done.exception()
    if error is None:
        found.set_result(done.result())
    elif type(error).__name__ in ("WorkerCrashedError", "NodeDiedError", "OutOfMemoryError", "LocalRayletDiedError"):
        found.set_exception(BrokenProcessPool(str(error)))
    else:
        found.set_exception(error)
