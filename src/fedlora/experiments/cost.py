"""What runs will cost, before they are started: examples by arithmetic; bytes, memory and time from two trial rounds.

A trial is a real run of two rounds, in a process of its own and a folder that goes away. It is scored in its second
round alone, so that a round and a scoring are told apart.
"""

from __future__ import annotations

import json
import math
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from fedlora.errors import WorkerDied
from fedlora.experiments.grid import Planned, client_count
from fedlora.experiments.tune import Progress
from fedlora.experiments.work import Work, begin
from fedlora.runs.config import RunConfig
from fedlora.runs.identity import digest_of
from fedlora.workers.processes import end, one_process

_NO_COST = {
    "run": {"seed", "rounds"},
    "train": {"learning_rate"},
    "clients": {"dirichlet_alpha"},
}  # change no round's length, or hardly


@dataclass(frozen=True)
class Trial:
    """Of a run like the tried one. once, round, scoring: seconds. megabytes: of messages in a round. memory: the
    process's largest, in GB, on the device that trains."""

    once: float
    round: float
    scoring: float
    megabytes: float
    memory: float

    def hours(self, config: RunConfig) -> float:
        rounds = config.run.rounds
        return (self.once + rounds * self.round + math.ceil(rounds / config.evaluate.every) * self.scoring) / 3600


def to_do(progress: Progress) -> list[Planned]:
    """The runs without a result. A run that waits for its search is shown by one at the largest value."""
    grid, found = progress.grid, [*progress.missing("search"), *progress.missing("run")]
    waiting = [cell for cell in grid.cells if grid.values and grid.key(cell) not in progress.choices]
    return [*found, *(grid.planned(cell, seed, grid.values[-1], "run") for cell in waiting for seed in grid.seeds)]


def examples(config: RunConfig) -> int | None:
    """The examples that a run's clients train on over all rounds, in whole batches; None if it trains by epochs, which
    only the data can count, or by a program."""
    train, run, count = config.train, config.run, client_count(config)
    if train.command is not None or train.max_steps < 0 or not count:
        return None
    return run.rounds * max(1, math.floor(run.participation * count + 0.5)) * train.max_steps * train.step_size


def tried(runs: Sequence[Planned], data_root: Path | None, tell: Callable[[Planned], None]) -> dict[str, Trial | str]:
    """Digest -> its trial, or why it failed. Runs that differ in seed, learning rate and skew share one."""
    kinds: dict[str, Trial | str] = {}
    found = {}
    for run in runs:
        kind = json.dumps(run.config.model_dump(mode="json", exclude=_NO_COST))
        if kind not in kinds:
            tell(run)
            executor = one_process(begin, "", server=("fedlora.runs.execution", "fedlora.runs.preparation", "peft"))
            try:
                kinds[kind] = executor.submit(_trial, run, data_root).result()
            except Exception as error:  # one that fails must not end the plan
                kinds[kind] = (str(error) or type(error).__name__).splitlines()[0]
            finally:
                end(executor)
        found[run.digest] = kinds[kind]
    return found


def _trial(run: Planned, data_root: Path | None) -> Trial:
    config, began = run.config, time.perf_counter()
    short = config.model_copy(
        update={
            "run": config.run.model_copy(update={"rounds": 2, "report_to": [], "checkpoint_every": 2}),
            "evaluate": config.evaluate.model_copy(update={"every": 2, "early_stopping_patience": None}),
        }
    )
    with TemporaryDirectory() as folder:
        work, run = Work(Path(folder), data_root), replace(run, config=short, digest=digest_of(short))
        if (why := work(run)) is not None:
            raise WorkerDied(why)
        first, second = work.run_folder(run).metrics()
    wall = time.perf_counter() - began
    seconds: list[dict[str, float]] = [line["seconds"] or {} for line in (first, second)]
    scoring = seconds[1].pop("evaluate", 0.0)
    a_round = sum(seconds[1].values())
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if torch.cuda.is_available():
        used = max(torch.cuda.max_memory_allocated(), 0) or used
    sent: Any = second["bytes"] or {}
    return Trial(
        wall - sum(seconds[0].values()) - a_round - scoring, a_round, scoring, sent.get("total", 0) / 1e6, used / 1e9
    )


def row_of(progress: Progress, trials: dict[str, Trial | str], price: float | None) -> dict[str, Any]:
    """A row of the plan. price: of an hour of one process."""
    todo = to_do(progress)
    counts = [examples(run.config) for run in todo]
    row: dict[str, Any] = {
        "experiment": progress.grid.experiment.name, "search runs": len(progress.grid.searches), "runs": progress.count,
        "finished": len(progress.used), "to do": len(todo),
        "examples to train": None if None in counts else sum(x for x in counts if x is not None),
    }  # fmt: skip
    known = [(run, trial) for run in todo if isinstance(trial := trials.get(run.digest), Trial)]
    if known:
        hours = sum(trial.hours(run.config) for run, trial in known)
        row |= {"MB": sum(run.config.run.rounds * trial.megabytes for run, trial in known), "hours": hours,
                "GB of a process": max(trial.memory for _, trial in known)}  # fmt: skip
        row |= {} if price is None else {"price": hours * price}
    return row
