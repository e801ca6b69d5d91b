"""The engine's interface to local training: a client's work as a function of its download and its data position."""

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
    """A round's training loss: the mean over the clients that count, weighted by their examples. Every single number
    reported as a round's loss is this one. NaN if any loss is NaN; None if no counted client reports a loss.

    losses, examples: by client; a client missing from either, or with no examples, does not count.

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
    """A job that raised, and its error.

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
        """Train the complete `adapter` from `position` in the client's data. A function of its arguments."""


class Workers(ABC):
    """Runs a round's jobs. Wrap your own trainer in `OneByOne`.

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
        """Each job and its result, in job order; jobs are drawn only as they are needed.

        Raises:
            FedLoRAError: the run itself is at fault, not one client.
        """


@dataclass(frozen=True)
class OneByOne(Workers):
    """Trains one client after another.

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
