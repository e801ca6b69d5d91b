"""A run's training and evaluation in several processes, if its configuration says so (`run.workers`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from fedlora.core.trainer import Failed, Job, Trained, Workers
from fedlora.errors import WorkerDied
from fedlora.runs.preparation import Prepared
from fedlora.runs.quiet import quiet_libraries
from fedlora.training.measure import Look, ModelEvaluator, Scores
from fedlora.training.models import AdaptedModel
from fedlora.workers.pool import train_by, train_in
from fedlora.workers.processes import Processes


@contextmanager
def crewed(prepared: Prepared) -> Iterator[Prepared]:
    """The same run, with its work done by `prepared.processes` processes; they end when this block does."""
    if prepared.processes == 1:
        yield prepared
        return
    probes = {name: f"probe/{name}" for name in prepared.probes}
    there = {"validation": prepared.validation, "test": prepared.test}
    there |= {probes[name]: evaluator for name, evaluator in prepared.probes.items()}
    evaluators = {name: evaluator for name, evaluator in there.items() if evaluator is not None}
    device = prepared.config.model.chosen_device()
    resident = _Aboard(prepared.model, prepared.workers, evaluators)
    server = None if device == "cpu" else [__name__, "peft", type(prepared.model.network).__module__]
    with Processes(resident, prepared.processes, begin=partial(_board, device=device), server=server) as processes:
        spread = {name: evaluator.spread(_Through(name, processes)) for name, evaluator in evaluators.items()}
        yield replace(
            prepared, workers=_Crew(processes), validation=spread.get("validation"), test=spread.get("test"),
            probes={name: spread[place] for name, place in probes.items()},
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Aboard:
    """What each process holds: one model, and the workers and evaluators that use it."""

    model: AdaptedModel
    workers: Workers
    evaluators: Mapping[str, ModelEvaluator]


@dataclass(frozen=True, eq=False)
class _Crew(Workers):
    """`Workers` that hand the jobs to the processes."""

    processes: Processes[_Aboard]

    def train_all(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Trained | Failed]]:
        return train_in(self.processes, _train, jobs)


@dataclass(frozen=True, eq=False)
class _Through:
    """Lets the processes look. Is a `measure.Through`."""

    name: str
    processes: Processes[_Aboard]

    def __call__(self, look: Callable[[Look], Scores], looks: Iterable[Look]) -> Iterator[Scores]:
        for seen in self.processes.map(partial(_look, self.name), looks):
            if isinstance(seen, WorkerDied):
                raise WorkerDied(f"the evaluation on {self.name} cannot be done: {seen}")
            yield seen


# --------------------------------------------------------------------------------------------- inside the processes


def _board(aboard: _Aboard, number: int, *, device: str) -> None:
    """Silence libraries, which report in the owner only. Use one GPU per process, unless the device is given."""
    quiet_libraries()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a forked tokenizer has no threads, and warns of it
    if device != "cpu":
        aboard.model.to(f"cuda:{number % torch.cuda.device_count()}" if device == "cuda" else device)


def _train(aboard: _Aboard, job: Job) -> Trained | Exception:
    return train_by(aboard.workers, job)


def _look(name: str, aboard: _Aboard, look: Look) -> Scores:
    return aboard.evaluators[name].look(look)
