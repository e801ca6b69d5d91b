"""The result of a finished run: one value, with the numbers that runs are compared by.

A line of a results file (`store`) is one of these. It contains no path and, except for `machine` and times,
nothing about where it was made. Keys of a run's summary that no table uses stay in the run's folder.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from statistics import fmean
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from fedlora.experiments.scores import Number, parse_number
from fedlora.runs.config import RunConfig
from fedlora.training.metrics import by_guessing, is_better

ABSENT: Literal["absent"] = "absent"  # a client that a round did not ask, or a score that it did not measure
Scores = dict[str, float | None]  # score -> value; None: the run diverged
Columns = dict[str, list[float | Literal["absent"] | None]]


class Part(BaseModel):
    """A table of a stored line. Unknown keys are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Commit(Part):
    """clean: from a checkout without local changes."""

    id: str
    clean: bool


class Machine(Part):
    device: str
    architecture: str
    cpus: int | None = None
    threads: int | None = None

    @property
    def words(self) -> str:
        counts = {"cpus": self.cpus, "threads": self.threads}
        more = [f"{count} {key}" for key, count in counts.items() if count is not None]
        return ", ".join([self.device, self.architecture, *more])


class Spent(Part):
    """A private run's planned spending."""

    epsilon_planned: float | None
    delta: float
    noise_multiplier: float
    sampling: float
    rounds_planned: int
    clip: float


class Held(Part):
    """Held-out scores at the best validation round, and at the last one."""

    best: Scores = {}
    last: Scores = {}


class History(Part):
    """The rounds, by columns. losses: client -> its training loss in each round. metrics: score -> its value on
    validation in each of the rounds `evaluated`."""

    losses: Columns = {}
    evaluated: list[int] = []
    metrics: Columns = {}

    @classmethod
    def of(cls, lines: Sequence[Mapping[str, Any]]) -> History:
        """Of a run's log (metrics.jsonl)."""
        measured = [line for line in lines if line["metrics"]]
        return cls(
            losses=_columns([line.get("losses") or {} for line in lines]),
            evaluated=[line["round"] for line in measured],
            metrics=_columns([line["metrics"] for line in measured]),
        )

    def losses_of(self, round: int) -> Scores:
        """Client -> its training loss in the round (from 1)."""
        return _row(self.losses, round - 1)

    def scores_of(self, round: int | None) -> Scores:
        """The scores on validation after that round; empty where it was not evaluated."""
        return _row(self.metrics, self.evaluated.index(round)) if round in self.evaluated else {}

    def curve(self, score: str) -> dict[int, float]:
        """Round -> the score on validation; NaN where the run had diverged."""
        values = self.metrics.get(score, [])
        return {
            r: float("nan") if x is None else x for r, x in zip(self.evaluated, values, strict=False) if x != ABSENT
        }


class Result(Part):
    """A finished run.

    digest: of its configuration. config: what differs from the defaults, with the names of its own files. files: key ->
    content of its own data and model, where it has some. target: whose model was measured, "server" or "clients".
    probes: further test sets. categories: task -> its category. ranks, examples: of each client. held_out, data, model:
    how many examples the held-out sets have, and digests of the data's parts and of the model. bytes, seconds: sums
    over rounds. gauge_drift: of the last round, relative.
    """

    digest: str
    config: dict[str, Any]
    files: dict[str, str] = {}
    method: str
    metric: str
    target: str
    rounds: int
    best_round: int | None = None
    history: History = History()
    test: Held
    probes: dict[str, dict[str, Scores]] = {}
    clients_at_end: dict[str, Scores] = {}
    categories: dict[str, str] = {}
    ranks: dict[str, int | str] = {}
    examples: dict[str, int] = {}
    held_out: dict[str, int] = {}
    data: dict[str, str] = {}
    model: str = ""
    bytes: dict[str, int] = {}
    seconds: dict[str, float] = {}
    wall_seconds: float = 0.0
    gauge_drift: dict[str, float | None] = {}
    classes: list[str] = []
    privacy: Spent | None = None
    commit: Commit | None
    machine: Machine
    versions: dict[str, str] = {}

    @cached_property
    def settings(self) -> RunConfig:
        """The configuration, with the defaults at the time of the run."""
        return whole_config(self.config)

    @property
    def validation(self) -> Held:
        """The scores on validation."""
        last = self.history.evaluated[-1] if self.history.evaluated else None
        return Held(best=self.history.scores_of(self.best_round), last=self.history.scores_of(last))

    @property
    def validation_best(self) -> float:
        """The best score on validation; NaN if no round had a number, because it diverged at once."""
        return _number(self.validation.best.get(self.metric))

    @property
    def megabytes_up(self) -> float | None:
        """What clients sent in all rounds, heads included; None for a private run, which does not report it."""
        return (self.bytes["up_adapter"] + self.bytes["up_heads"]) / 1e6 if self.bytes else None

    @property
    def megabytes_down(self) -> float | None:
        return self.bytes["total"] / 1e6 - (self.megabytes_up or 0.0) if self.bytes else None

    def on_own_data(self, which: str) -> bool:
        """Whether a number describes clients' own models, each on its client's own data, which no server's number is
        comparable with."""
        return self.target == "clients" and parse_number(which).own_data(self.settings)

    def chance(self, metric: str | None = None) -> float | None:
        """The score of guessing by that metric, or the result's own; None if there is no such number."""
        return by_guessing(metric or self.metric, len(self.classes))

    def score(self, which: str) -> float | None:
        """A number by its name (`scores.KNOWN`). None if the run has no such number: it diverged, never got there, or
        was evaluated too seldom. Raises `ConfigError` for an unknown name."""
        number = parse_number(which)
        if number.where == "rounds":
            return self.rounds_to(number.target)
        if number.where == "validation":
            held = self.validation.best if number.what == "best" else self.validation.last
            found = _number(held.get(self.metric))
        elif number.where == "clients":
            each = [_number(scores.get(self.metric)) for scores in self.clients_at_end.values()]
            found = fmean(each) if each else math.nan
        else:
            found = _number(self._held_out(number).get(self.metric))
        return None if math.isnan(found) else found

    def by_category(self, which: str) -> dict[str, float]:
        """Category -> the mean over its tasks, for data that come in tasks. which: "test, last", "unseen, last", ..."""
        found: dict[str, list[float]] = {}
        for name, score in self._held_out(parse_number(which)).items():
            if name.startswith("group/"):
                task = name.removeprefix("group/")
                found.setdefault(self.categories.get(task, task), []).append(_number(score))
        return {category: fmean(scores) for category, scores in found.items()}

    def rounds_to(self, target: float) -> int | None:
        """The first evaluated round whose validation metric reaches the target; None if none does."""
        curve = self.history.curve(self.metric).items()
        return next((t for t, x in curve if not math.isnan(x) and not is_better(self.metric, target, x)), None)

    def _held_out(self, number: Number) -> Scores:
        """The scores on the test set or on a further one; empty if it was not measured."""
        if number.where == "test":
            return self.test.best if number.what == "best" else self.test.last
        return self.probes.get(number.what, {}).get(number.where, {})


def short_config(config: RunConfig) -> dict[str, Any]:
    """Settings that differ from the defaults."""
    return config.model_dump(mode="json", exclude_defaults=True)


def whole_config(told: Mapping[str, Any]) -> RunConfig:
    """The whole configuration from the result of `short_config`."""
    return RunConfig.model_validate(told)


def content(facts: Any) -> str:
    """A digest of what JSON can hold: of facts about data or a model's files, of settings."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _columns(rows: Sequence[Mapping[str, Any]]) -> Columns:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name, ABSENT) for row in rows] for name in names}


def _row(columns: Columns, k: int) -> Scores:
    found = {name: column[k] for name, column in columns.items()}
    return {name: x for name, x in found.items() if x != ABSENT}


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
