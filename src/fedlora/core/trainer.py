"""What an engine needs of local training: a client's work, a function of what it received and where its data stand."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from fedlora.core.lora import Adapter
from fedlora.core.messages import Download
from fedlora.errors import FedLoRAError, HyperparameterError

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Trained:
    """What local training returns: the complete adapter, its examples, mean loss, and the new data position.

    Example:
        >>> Trained(seed_adapter, num_examples=100, loss=0.7, position=32).position
        32
    """

    adapter: Adapter
    num_examples: int
    loss: float
    position: int


def round_loss(losses: Mapping[str, float], examples: Mapping[str, float]) -> float | None:
    """A round's training loss: the mean over the clients that count, each weighted by its examples. Wherever one number
    stands for a round's loss, it is this one. NaN where one of them is; None where nobody who counts tells a loss.

    losses, examples: by client; who is missing in one of them, or has no examples, does not count.

    Example:
        >>> round_loss({"a": 0.25, "b": 0.5, "refused": 9.0}, {"a": 300, "b": 100})
        0.3125
    """
    counting = {client: examples[client] for client in losses if examples.get(client)}
    total = sum(counting.values())
    return sum(n * losses[client] for client, n in counting.items()) / total if total else None


@dataclass(frozen=True, eq=False)
class Job:
    """One client's local work: the arguments of `Trainer.train`.

    Example:
        >>> job = begin_round(server.download(state, clients[0]), ClientMemory())
        >>> trainer.train(job.download, job.adapter, job.position).position
        8
    """

    download: Download
    adapter: Adapter
    position: int


@dataclass(frozen=True, eq=False)
class Failed:
    """A job that raised, and what.

    Example:
        >>> job = begin_round(server.download(state, clients[0]), ClientMemory())
        >>> Failed(job, RuntimeError("out of memory")).error
        RuntimeError('out of memory')
    """

    job: Job
    error: Exception


class Trainer(Protocol):
    """Runs one client's local work.

    Example:
        >>> class Shrinking:
        ...     def train(self, download, adapter, position):
        ...         return Trained(adapter.map(lambda t: t * 0.9), num_examples=10, loss=0.0, position=position + 10)
        >>> play_round(server.download(state, clients[0]), ClientMemory(), Shrinking()).memory.position
        10
    """

    def train(self, download: Download, adapter: Adapter, position: int) -> Trained:
        """Train `adapter`, the complete one, from `position` in the client's data. A function of its arguments."""


class GroupTrainer(Trainer, Protocol):
    """A trainer that can run several clients' local work at once.

    Example:
        >>> class Pairs:
        ...     def train(self, download, adapter, position):
        ...         return trainer.train(download, adapter, position)
        ...
        ...     def train_group(self, jobs):
        ...         return [self.train(job.download, job.adapter, job.position) for job in jobs]
        >>> workers = Together(Pairs(), size=2)
    """

    def train_group(self, jobs: Sequence[Job]) -> list[Trained]:
        """What `train` gives for each job, in their order. The jobs are of one round."""


class Workers(ABC):
    """Who does a round's jobs, and how many at a time. A trainer of one's own is put into `OneByOne`.

    Example:
        >>> class Backwards(Workers):
        ...     def train_all(self, jobs):
        ...         for job in reversed(list(jobs)):
        ...             yield job, trainer.train(job.download, job.adapter, job.position)
        >>> next(simulate(server, clients, Backwards(), start(server, seed_adapter), rounds=1)).round
        1
    """

    @property
    def at_once(self) -> int:
        """How many jobs make one piece of work, which stays in one place."""
        return 1

    @abstractmethod
    def train_all(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Trained | Failed]]:
        """Each job and its result, in the order of the jobs; jobs are drawn no earlier than they are needed.

        Raises:
            FedLoRAError: what is wrong with the run itself is nobody's failure.
        """


@dataclass(frozen=True)
class OneByOne(Workers):
    """One client after the other, by a trainer.

    Example:
        >>> next(simulate(server, clients, OneByOne(trainer), start(server, seed_adapter), rounds=1)).round
        1
    """

    trainer: Trainer

    def train_all(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Trained | Failed]]:
        for job in jobs:
            yield job, _trained(self.trainer, job)


@dataclass(frozen=True)
class Together(Workers):
    """`size` clients at once, by a trainer that can. A group that fails is trained again one by one.

    Raises:
        HyperparameterError: a size below 1.

    Example:
        >>> from fedlora.training import GroupedTrainer
        >>> def workers(model, data, settings):
        ...     return Together(GroupedTrainer(model, data, settings, seed=0), size=4)
    """

    trainer: GroupTrainer
    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise HyperparameterError(f"Together: size is a number of clients >= 1; got {self.size}.")
        if not callable(getattr(self.trainer, "train_group", None)):  # or every group would fail, and go one by one
            raise HyperparameterError(
                f"Together needs a trainer with train_group(jobs), and {type(self.trainer).__name__} has none; give "
                f"the trainer itself, and its clients are trained one by one."
            )

    @property
    def at_once(self) -> int:
        return self.size

    def train_all(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Trained | Failed]]:
        rest = iter(jobs)
        while group := list(islice(rest, self.size)):
            yield from zip(group, self._group(group), strict=True)

    def _group(self, jobs: Sequence[Job]) -> Sequence[Trained | Failed]:
        if len(jobs) > 1:
            try:
                results = self.trainer.train_group(jobs)
                if len(results) != len(jobs) or not all(isinstance(result, Trained) for result in results):
                    raise TypeError(f"train_group gave {len(results)} results for {len(jobs)} jobs, or no Trained")
                return results
            except FedLoRAError:
                raise
            except Exception as error:
                log.warning("training %d clients together failed (%s); they are trained one by one", len(jobs), error)
        return [_trained(self.trainer, job) for job in jobs]


def _trained(trainer: Trainer, job: Job) -> Trained | Failed:
    try:
        result = trainer.train(job.download, job.adapter, job.position)
        if not isinstance(result, Trained):
            raise TypeError(f"train() gave a {type(result).__name__}; a Trained is needed")
        return result
    except FedLoRAError:
        raise
    except Exception as error:
        return Failed(job, error)
