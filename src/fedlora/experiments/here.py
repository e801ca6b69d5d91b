"""Runs on this machine: in this process, or in several, each with a GPU of its own if there are some.

What makes runs is a generator of (run, None or why it failed), as they end; a None between them says that nothing has
ended meanwhile, so that whoever drives it can look at the rounds.
"""

from __future__ import annotations

import logging
import os
from collections import Counter, deque
from collections.abc import Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

import torch

from fedlora.errors import ConfigError
from fedlora.experiments.grid import Planned
from fedlora.experiments.work import Work, begin
from fedlora.workers.processes import available, end, one_process

log = logging.getLogger(__name__)
Ended = Generator[tuple[Planned, str | None] | None, None, None]
TRIES = 2  # of a run whose process is killed
KILLED = "its process was killed twice, perhaps for want of memory"
LOOK = 0.3  # seconds
_IMPORTED = ("fedlora.runs.execution", "fedlora.runs.preparation", "peft")  # once, for all processes


def here(runs: Sequence[Planned], work: Work, workers: int = 1) -> Ended:
    """The runs, as many at a time as there are workers. Each is an executor of one process, so that a killed one costs
    only its own run, which begins again where its checkpoint is; they end with this process. Close the generator to end
    them at once."""
    if workers == 1:
        begin()
        for run in runs:
            yield from work.steps(run)
            yield run, work.why(run)
        return
    gpus = dealt(workers, runs)
    left, free, tries = deque(runs), [*range(min(workers, len(runs)))], Counter[str]()
    executors: dict[int, ProcessPoolExecutor] = {}
    running: dict[Future[str | None], tuple[int, Planned]] = {}
    try:
        while left or running:
            while left and free:
                worker, run = free.pop(0), left.popleft()
                if worker not in executors:
                    executors[worker] = one_process(begin, gpus[worker], server=_IMPORTED)
                running[executors[worker].submit(work, run)] = worker, run
                tries[run.digest] += 1
            done = wait(running, LOOK, FIRST_COMPLETED).done
            for future in done:
                worker, run = running.pop(future)
                free.append(worker)
                error = future.exception()
                if not isinstance(error, BrokenProcessPool):
                    yield run, future.result() if error is None else f"{type(error).__name__}: {error}"
                    continue
                end(executors.pop(worker))
                if tries[run.digest] == TRIES:
                    yield run, KILLED
                else:
                    log.warning("%s: its process was killed; another one takes up its work", run.label)
                    left.appendleft(run)
            yield None
    finally:
        for executor in executors.values():
            end(executor)


def worker_count(text: str, runs: Sequence[Planned]) -> int:
    """The number of workers from `--workers`: N, or "auto", which is one for each core that this process may use, or
    for each GPU. Raises `ConfigError` if the text is neither."""
    if text == "auto":
        on_gpu = any(run.config.model.device != "cpu" for run in runs)
        return max(1, min(len(runs), (len(visible()) if on_gpu else 0) or available()))
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"--workers must be a whole number of at least 1, or auto; got {text!r}.")
    return int(text)


def visible() -> list[str]:
    """The names of this process's GPUs, as in CUDA_VISIBLE_DEVICES, which may leave some out."""
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    count = torch.cuda.device_count()
    return names[:count] if all(names) else [str(number) for number in range(count)]


def dealt(workers: int, runs: Sequence[Planned]) -> list[str]:
    """What each worker sees: its share of the GPUs, or one that it shares, if there are more workers than GPUs. ""
    leaves it what its parent sees: for runs on the CPU, or without a GPU."""
    gpus = visible()
    if not gpus or all(run.config.model.device == "cpu" for run in runs):
        return [""] * workers
    return [",".join(gpus[k::workers] or [gpus[k % len(gpus)]]) for k in range(workers)]
