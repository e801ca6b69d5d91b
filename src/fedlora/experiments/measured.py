"""`--measure`: seconds of a run from a few steps, texts and messages of each kind of run, on this device."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedlora.client import begin_round
from fedlora.core.messages import ClientMemory
from fedlora.doing import doing
from fedlora.errors import ConfigError, FedLoRAError
from fedlora.experiments.costs import Workload
from fedlora.experiments.runnable import clients_of
from fedlora.experiments.traffic import Nudged
from fedlora.runs.config import RunConfig
from fedlora.runs.observers import diagnosed
from fedlora.runs.preparation import Prepared, prepare
from fedlora.server.sampling import sample_clients
from fedlora.server.server import start
from fedlora.simulation import RoundRecord, simulate
from fedlora.training.loop import LocalTrainer

_STEPS = 3
_NO_COST = {  # what does not change how long a step, a text or a round takes
    "run": {"seed", "rounds", "participation"}, "train": {"lr", "steps", "epochs", "schedule"},
    "clients": {"alpha", "partition"},
}  # fmt: skip


@dataclass(frozen=True)
class Pace:
    """Seconds: for what a run does once (begin, and check its last uploads), for each example trained, each text scored
    (with its answer, if one is generated), and for each client's messages in a round, with their share of the server's
    work and of the diagnosis."""

    once: float
    example: float
    text: float
    messages: float


class Paces:
    """Measures each kind of run once. What it writes is nothing; a run that cannot be prepared has no pace."""

    def __init__(self, data_root: Path | None) -> None:
        self._root = data_root
        self._known: dict[str, Pace | None] = {}

    def seconds(self, config: RunConfig, work: Workload) -> float | None:
        """Of the whole run in one process; None if it cannot be measured or counted."""
        key = json.dumps(config.model_dump(mode="json", exclude=_NO_COST))
        if key not in self._known:
            try:
                self._known[key] = measured(config, self._root)
            except FedLoRAError:
                self._known[key] = None  # `checks.problems` says why
        pace, scored = self._known[key], work.scored or 0
        if pace is None or work.trained is None:
            return None
        a_round = max(1, math.floor(config.run.participation * clients_of(config) + 0.5))
        return (
            pace.once + work.trained * pace.example + scored * pace.text + config.run.rounds * a_round * pace.messages
        )


@doing("measuring the pace")
def measured(config: RunConfig, data_root: Path | None) -> Pace:
    """The pace of runs like this one. Raises whatever `prepare` raises."""
    began = time.perf_counter()
    prepared = prepare(_few(config), data_root)
    if not isinstance(prepared.trainer, LocalTrainer):
        raise ConfigError("train.command: a program may begin with all its data, so a few steps of it cannot be timed.")
    begin = time.perf_counter() - began
    clients = sorted(prepared.clients, key=lambda client: max(client.ranks(prepared.seed_adapter.modules).values()))
    state = start(prepared.server, prepared.seed_adapter)
    job = begin_round(prepared.server.download(state.server, clients[len(clients) // 2]), ClientMemory())
    examples = prepared.trainer.train(job.download, job.adapter, 0).position
    training = _second(lambda: prepared.trainer.train(job.download, job.adapter, 0))
    messages, check = _messages(prepared)
    return Pace(begin + check, training / examples, _text(prepared), messages)


def _text(prepared: Prepared) -> float:
    evaluator = prepared.validation or prepared.test
    if evaluator is None:
        return 0.0
    adapter = prepared.seed_adapter
    return _second(lambda: evaluator.measure_adapter(adapter)) / evaluator.count()


def _messages(prepared: Prepared) -> tuple[float, float]:
    """Of one client in a round, without training; and of the check after the last round."""
    run, state = prepared.config.run, start(prepared.server, prepared.seed_adapter)
    names = sample_clients([client.id for client in prepared.clients], run.participation, seed=run.seed, round=0)
    asked = [client for client in prepared.clients if client.id in names]
    played: list[RoundRecord] = []

    def one() -> None:
        played.append(next(simulate(prepared.server, asked, Nudged(), state, rounds=1)))

    seconds, began = _second(one), time.perf_counter()
    seen = diagnosed(prepared, state, played[-1], last=True, private=None)
    diagnosis = seen.record.seconds.get("diagnose", 0.0)
    return (seconds + diagnosis) / len(asked), time.perf_counter() - began - diagnosis


def _second(work: Callable[[], object]) -> float:
    """The seconds of the second time: the first also loads kernels and fills caches."""
    work()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _few(config: RunConfig) -> RunConfig:
    """The run with few examples, dealt alike, and few steps."""
    train, data, clients = config.train, config.data, config.clients
    apart = bool(data.clients) or data.task == "superni"
    count = 1 if apart else clients_of(config)
    most = count * max(_STEPS * train.batch_size, 2 * clients.min_size, 64)
    held = 4 * config.evaluate.batch_size

    def least(limit: int | None, few: int) -> int:
        return few if limit is None else min(limit, few)

    return config.model_copy(
        update={
            "train": train.model_copy(update={"steps": _STEPS}),
            "data": data.model_copy(
                update={"max_train": least(data.max_train, most), "max_test": least(data.max_test, held)}
            ),
            "clients": clients if apart else clients.model_copy(update={"partition": "iid", "alpha": None}),
            "run": config.run.model_copy(update={"workers": None, "track": []}),
        }
    )
