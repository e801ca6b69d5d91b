"""A trainer in several processes: `Workers` that train clients of a round at the same time.

The results have the same bits as one worker at one thread, for any number of processes: a client's work is a function
of its download and its own data, and nothing is added up across clients before the server.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fedlora.core.trainer import Failed, Job, OneByOne, Trained, Trainer, Workers
from fedlora.workers.processes import Processes, portable


class Pool(Processes[Workers], Workers):
    """`size` processes that each train with a copy of `trainer`. They start with the first round; close them, or use
    `with`. The client whose process dies has failed, and another process takes its place.

    Args:
        trainer: a trainer, or workers, on the CPU. A copy's changes to itself stay in its process, and are lost with
            it: `train` must be a function of its arguments.
        size: number of processes.

    Raises:
        HyperparameterError: as in `Processes`.

    Example:
        >>> with Pool(trainer, 2) as workers:
        ...     records = list(simulate(server, clients, workers, start(server, seed_adapter), rounds=2))
        >>> [record.round for record in records]
        [1, 2]
    """

    def __init__(self, trainer: Trainer | Workers, size: int) -> None:
        super().__init__(trainer if isinstance(trainer, Workers) else OneByOne(trainer), size)

    def train_all(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Trained | Failed]]:
        return train_in(self, train_by, jobs)


def train_in(
    processes: Processes[Any], work: Callable[[Any, Job], Trained | Exception], jobs: Iterable[Job]
) -> Iterator[tuple[Job, Trained | Failed]]:
    """Each job with its result, in order, trained by `work` in one of the processes."""
    drawn = deque[Job]()

    def watched() -> Iterator[Job]:
        for job in jobs:
            drawn.append(job)
            yield job

    for result in processes.map(work, watched()):
        job = drawn.popleft()
        yield job, Failed(job, result) if isinstance(result, Exception) else result


def train_by(workers: Workers, job: Job) -> Trained | Exception:
    """The job's result from these workers, in this process."""
    ((_, result),) = workers.train_all([job])
    return portable(result.error) if isinstance(result, Failed) else result
