"""The cost of runs: training examples, scored held-out texts, and the time of finished runs."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from fedlora.errors import ConfigError, DataError
from fedlora.experiments.result import Result
from fedlora.experiments.runnable import clients_of
from fedlora.experiments.scores import of_clients
from fedlora.runs.client_data import Dealt, deal
from fedlora.runs.config import RunConfig
from fedlora.server.sampling import sample_clients
from fedlora.training.settings import TrainSection


@dataclass(frozen=True)
class Times:
    """The totals of some runs. examples: trained on, None if one run cannot be counted. training, wall: seconds;
    training is the clients' time, wall that of whole processes."""

    runs: int
    examples: int | None
    training: float
    wall: float


@dataclass(frozen=True)
class Workload:
    """The work of a run. trained: examples, over all clients and rounds; None if they cannot be counted. most: it may
    be less, because without data a client may lack a whole batch. scored: held-out texts to score, at most; None if the
    data are not here. why: the problem with the data, "" if they are here."""

    trained: int | None
    most: bool
    scored: int | None
    why: str


class Workloads:
    """Counts runs. It reads clients' sizes from the data, once for all runs with the same partition. data_root: for
    named data; without it these are not searched for (the hub is not asked)."""

    def __init__(self, data_root: Path | None) -> None:
        self._root = data_root
        self._dealt: dict[str, tuple[Mapping[str, int], Held] | str] = {}

    def of(self, config: RunConfig) -> Workload:
        c = config.clients
        count = c.count or (len(c.ranks or ()) if not c.profile else 0)
        key = json.dumps([config.data.model_dump(), config.run.seed, config.model.task, count, c.partition, c.alpha,
                          c.min_size, c.own_test], default=str)  # fmt: skip
        if key not in self._dealt:
            self._dealt[key] = self._deal(config)
        found = self._dealt[key]
        if isinstance(found, str):
            return Workload(examples_of(config), True, None, found)
        sizes, held = found
        return Workload(examples_of(config, sizes), False, _scored(config, held), "")

    def _deal(self, config: RunConfig) -> tuple[Mapping[str, int], Held] | str:
        if config.data.task is not None and self._root is None:
            return f"data.task = {config.data.task!r} without --data-root"
        try:
            dealt = deal(config, self._root)
        except (ConfigError, DataError) as error:
            return str(error).splitlines()[0]
        return {client: len(part) for client, part in dealt.parts.items()}, Held.of(dealt)


@dataclass(frozen=True)
class Held:
    """The number of held-out texts: common ones, all clients' together, and those of further test sets."""

    clients: int
    validation: int
    test: int
    own_validation: int
    own_test: int
    probes: int

    @classmethod
    def of(cls, dealt: Dealt) -> Held:
        each = [dealt.validation, dealt.test, dealt.own_validation, dealt.own_test]
        validation, test, own_validation, own_test = (sum(map(len, sets.values())) for sets in each)
        probes = sum(len(part) for sets in dealt.probes.values() for part in sets.values())
        return cls(len(dealt.parts), validation, test, own_validation, own_test, probes)


def examples_of(config: RunConfig, sizes: Mapping[str, int] | None = None) -> int | None:
    """The number of examples that a run's clients train on, over all rounds; for a private run, whose draw is secret,
    the expected number.

    sizes: client -> its number of examples. Without them each client takes whole batches, which is the most; None if it
    trains by epochs, which only the data can count.
    """
    train, run = config.train, config.run
    if sizes is None:
        if not train.steps:
            return None
        sizes = {str(k): train.batch_size for k in range(clients_of(config))}
    names = tuple(sizes)
    if config.privacy is not None or run.participation == 1.0:
        turns: Mapping[str, float] = dict.fromkeys(names, run.rounds * run.participation)
    else:
        turns = _turns(names, run.participation, run.seed, run.rounds)
    return round(sum(turns[name] * _a_round(train, size) for name, size in sizes.items()))


def trained_on(result: Result) -> int | None:
    """`examples_of` a finished run, from the sizes that it recorded; a private run does not report them."""
    train = result.settings.train
    sizes = result.examples or (dict.fromkeys(result.ranks, train.batch_size) if train.steps else {})
    return examples_of(result.settings, sizes) if sizes else None


def times_of(results: Iterable[Result]) -> Times:
    """The sums over these runs."""
    each = list(results)
    trained = [trained_on(result) for result in each]
    return Times(
        len(each),
        None if None in trained else sum(n for n in trained if n is not None),
        sum(result.seconds.get("train", 0.0) for result in each),
        sum(result.wall_seconds for result in each),
    )


def _a_round(train: TrainSection, size: int) -> int:
    """The examples that a client of this size trains on in a round, as in `training.local`: a client with less than one
    batch uses a batch of its own size."""
    batch = min(train.batch_size, size)
    return (train.steps or math.ceil(train.epochs * size / batch)) * batch


@lru_cache(maxsize=256)
def _turns(names: tuple[str, ...], share: float, seed: int, rounds: int) -> Mapping[str, int]:
    """Client -> the number of rounds in which it takes part."""
    return Counter(one for k in range(rounds) for one in sample_clients(names, share, seed=seed, round=k))


def _scored(config: RunConfig, held: Held) -> int:
    """Validation by rounds, the test sets at the last and best round, and clients' own at the end."""
    e, rounds = config.evaluate, config.run.rounds
    validation, test, probes = held.validation, held.test, held.probes
    if of_clients(config):
        validation = held.own_validation or held.clients * validation
        test, probes = held.own_test or held.clients * test, held.clients * probes
    at_end = (held.own_test or held.clients * held.test) if e.clients_at_end else 0
    at_end += held.clients * held.test if e.clients_at_end == "both" else 0
    evaluations = math.ceil(rounds / e.every)
    states = 2 if validation and evaluations > 1 else 1  # the last, and the best if it can be another
    return evaluations * validation + states * (test + probes) + at_end
