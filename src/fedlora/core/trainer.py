"""What an engine needs of local training: a client's work, a function of what it received and where its data stand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from fedlora.core.lora import Adapter
from fedlora.core.messages import Download
from fedlora.errors import FedLoRAError


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


class Workers(ABC):
    """Who does a round's jobs. A trainer of one's own is put into `OneByOne`.

    Example:
        >>> class Backwards(Workers):
        ...     def train_all(self, jobs):
        ...         for job in reversed(list(jobs)):
        ...             yield job, trainer.train(job.download, job.adapter, job.position)
        >>> next(simulate(server, clients, Backwards(), start(server, seed_adapter), rounds=1)).round
        1
    """

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
