"""The result of a finished run: one value, with the numbers that runs are compared by.

A line of a results file (`store`) is one of these. It contains no path and, except for `machine`, `parts` and times,
nothing about where it was made. Keys of a run's summary that no table uses stay in the run's folder.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from fedlora.experiments.scores import Number, parse_number
from fedlora.runs.config import FORMER_DEFAULTS, RunConfig
from fedlora.training.metrics import by_guessing, find_metric, is_better

PADDED = "padded-average"  # the method whose error every run measures on its own uploads
SCORES = ("loss", "accuracy")  # on the test set after the last round, for the tables of costs
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


class Made(Part):
    """The origin of a part of a run, the rounds after `after`. commit: None for code outside a checkout."""

    commit: Commit | None
    machine: Machine
    after: int = 0

    @property
    def clean(self) -> bool:
        return self.commit is not None and self.commit.clean


class Merged(Part):
    """One merger's result from a run's uploads (`mergers`). strength: C of a head; strengths_tried: the ends of its
    grid. made: its origin, if it was not recorded with the training."""

    merger: dict[str, Any]
    test: Scores
    validation: Scores = {}
    norm: float | None = None
    error: float | None = None
    rank: int | None = None
    strength: float | None = None
    strengths_tried: list[float] = []
    made: Made | None = None


class Spent(Part):
    """A private run's planned spending."""

    epsilon_planned: float | None
    delta: float
    noise_multiplier: float
    sampling: float
    rounds_planned: int
    clip: float


class Confusion(Part):
    """The test set's confusion: a row is a true class, a column a predicted class."""

    classes: list[str]
    last: list[list[int]] | None = None
    best: list[list[int]] | None = None


class Held(Part):
    """Held-out scores at the best validation round, and at the last one."""

    best: Scores = {}
    last: Scores = {}


class History(Part):
    """The rounds, by columns. losses: client -> its training loss in each round. metrics: score -> its value on
    validation in each of the rounds `evaluated`. padded_error, server_rank: of each round; None if not measured."""

    losses: Columns = {}
    evaluated: list[int] = []
    metrics: Columns = {}
    padded_error: list[float | None] = []
    server_rank: list[float | None] = []

    @classmethod
    def of(cls, lines: Sequence[Mapping[str, Any]]) -> History:
        """Of a run's log (metrics.jsonl)."""
        measured = [line for line in lines if line["metrics"]]
        return cls(
            losses=_columns([line.get("losses") or {} for line in lines]),
            evaluated=[line["round"] for line in measured],
            metrics=_columns([line["metrics"] for line in measured]),
            padded_error=[line.get("padded_error") for line in lines],
            server_rank=[line.get("server_rank") for line in lines],
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
    over rounds. padded_error, gauge_drift: of the last round, relative. of: the merger that it stands for (`merged`).
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
    padded_error: float | None = None
    gauge_drift: dict[str, float | None] = {}
    confusion: Confusion | None = None
    privacy: Spent | None = None
    commit: Commit | None
    machine: Machine
    versions: dict[str, str] = {}
    parts: list[Made] = []
    mergers: dict[str, Merged] = {}
    of: Merged | None = Field(default=None, exclude=True)

    @cached_property
    def settings(self) -> RunConfig:
        """The configuration, with the defaults at the time of the run."""
        return whole_config(self.config)

    @property
    def made(self) -> list[Made]:
        """Its origins: each part of the training, and its mergers, or the one merger that it is."""
        trained = self.parts or [Made(commit=self.commit, machine=self.machine)]
        merged = self.mergers.values() if self.of is None else [self.of]
        return [*trained, *(one.made for one in merged if one.made is not None)]

    @property
    def clean(self) -> bool:
        """Whether every part comes from a commit without changes."""
        return all(part.clean for part in self.made)

    def commits(self, digits: int) -> list[str]:
        """The commits of all its parts, each once, cut to this many digits; "unknown" for code outside a checkout."""
        return list(dict.fromkeys(_commit_words(part.commit, digits) for part in self.made))

    @property
    def validation(self) -> Held:
        """The scores on validation; a merger has its own."""
        if self.of is not None:
            return Held(best=self.of.validation, last=self.of.validation)
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
        comparable with. A merger is measured on the common data."""
        return self.target == "clients" and self.of is None and parse_number(which).own_data(self.settings)

    def tested(self, score: str) -> float | None:
        """A score on the test set after the last round; None if there is no finite number."""
        value = _number(self.test.last.get(score))
        return value if math.isfinite(value) else None

    def chance(self, metric: str | None = None) -> float | None:
        """The score of guessing by that metric, or the result's own; None if there is no such number."""
        return by_guessing(metric or self.metric, len(self.confusion.classes) if self.confusion else 0)

    def merged(self, label: str, merger: Mapping[str, Any]) -> Result | None:
        """The result of one merger of the run's uploads, as if it were a run; None if no merger with these settings was
        made. The settings decide, whatever label they were made under."""
        mine = self.mergers.get(label)
        made = [mine] if mine is not None and mine.merger == merger else [
            one for one in self.mergers.values() if one.merger == merger]  # fmt: skip
        if not made:
            return None
        held = Held(best=made[0].test, last=made[0].test)
        changes = {"test": held, "history": History(), "probes": {}, "clients_at_end": {}, "of": made[0]}
        return self.model_copy(update=changes)

    def with_mergers_of(self, other: Result) -> Result:
        """The result, with the mergers of another result of this run that it lacks."""
        new = {
            label if label not in self.mergers else f"{label} (changed)": one
            for label, one in other.mergers.items()
            if self.merged(label, one.merger) is None
        }
        return self.model_copy(update={"mergers": {**new, **self.mergers}}) if new else self

    def score(self, which: str) -> float | None:
        """A number by its name (`scores.KNOWN`). None if the run has no such number: it diverged, never got there, or
        was evaluated too seldom. Raises `ConfigError` for an unknown name."""
        number = parse_number(which)
        if number.where == "rounds":
            return self.rounds_to(number.amount)
        if number.where == "validation":
            found = self._of_validation(number)
        elif number.where == "server":
            found = self._of_server(number.what)
        elif number.where == "clients":
            each = [_number(scores.get(self.metric)) for scores in self.clients_at_end.values()]
            found = fmean(each) if each else math.nan
        else:
            found = _number(self._held_out(number).get(self.metric))
        return None if math.isnan(found) else found

    def by_group(self, which: str) -> dict[str, float]:
        """Held-out set -> its own score, for "test, last", "unseen, last" and so on, if there are several sets."""
        scores = self._held_out(parse_number(which))
        return {name.removeprefix("group/"): _number(x) for name, x in scores.items() if name.startswith("group/")}

    def by_category(self, which: str) -> dict[str, float]:
        """Category -> the mean over its tasks, for data that come in tasks. which: as in `by_group`."""
        found: dict[str, list[float]] = {}
        for task, score in self.by_group(which).items():
            found.setdefault(self.categories.get(task, task), []).append(score)
        return {category: fmean(scores) for category, scores in found.items()}

    def rounds_to(self, target: float) -> int | None:
        """The first evaluated round whose validation metric reaches the target; None if none does (censored)."""
        curve = self.history.curve(self.metric).items()
        return next((t for t, x in curve if not math.isnan(x) and not is_better(self.metric, target, x)), None)

    def _of_validation(self, number: Number) -> float:
        """The number on validation; NaN if there is none."""
        if number.what == "best":
            return self.validation_best
        history = list(self.history.curve(self.metric).values())
        if len(history) < number.evaluations():
            return math.nan
        if number.what == "last":
            return history[-1]
        if number.what == "mean of last":
            return fmean(history[-int(number.amount) :])
        changes = [b - a for a, b in pairwise(history)]
        if any(map(math.isnan, changes)):
            return math.nan
        if number.what == "jitter":
            return stdev(changes)
        up = find_metric(self.metric).larger_is_better
        return max([0.0, *(-change if up else change for change in changes)])  # a rise, if less is better

    def _of_server(self, what: str) -> float:
        """Relative numbers of the last round's update: its distance from the exact mean, how far it moves when clients
        change their coordinates, and the error that zero-padded factor averages of the same uploads would have had. NaN
        if it was not measured."""
        if what == "gauge drift":
            return _number(self.gauge_drift.get(self.of.merger.get("name", "") if self.of else self.method))
        if what == "error" and (self.of is not None or self.method != PADDED):
            return _number(self.of.error if self.of else None)
        return _number(self.padded_error)

    def _held_out(self, number: Number) -> Scores:
        """The scores on the test set or on a further one; empty if it was not measured."""
        if number.where == "test":
            return self.test.best if number.what == "best" else self.test.last
        return self.probes.get(number.what, {}).get(number.where, {})


def short_config(config: RunConfig) -> dict[str, Any]:
    """Settings that differ from the defaults, and keys whose default has changed since the first runs were stored."""
    told = config.model_dump(mode="json", exclude_defaults=True)
    for table, key in FORMER_DEFAULTS:
        told.setdefault(table, {})[key] = getattr(getattr(config, table), key)
    return told


def whole_config(told: Mapping[str, Any]) -> RunConfig:
    """The whole configuration from the result of `short_config`."""
    tables = {key: dict(value) if isinstance(value, Mapping) else value for key, value in told.items()}
    for (table, key), former in FORMER_DEFAULTS.items():
        tables.setdefault(table, {}).setdefault(key, former)
    return RunConfig.model_validate(tables)


def content(facts: Any) -> str:
    """A digest of what JSON can hold: of facts about data or a model's files, of settings, of questions."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def unclean_lines(results: Iterable[Result]) -> list[str]:
    """A line if some results are from a changed checkout."""
    each = list(results)
    changed = sum(not result.clean for result in each)
    return [f"{changed} of {len(each)} results are of changed checkouts, which no commit describes."] if changed else []


def _columns(rows: Sequence[Mapping[str, Any]]) -> Columns:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name, ABSENT) for row in rows] for name in names}


def _row(columns: Columns, k: int) -> Scores:
    found = {name: column[k] for name, column in columns.items()}
    return {name: x for name, x in found.items() if x != ABSENT}


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _commit_words(commit: Commit | None, digits: int) -> str:
    return "unknown" if commit is None else commit.id[:digits] + ("" if commit.clean else " with changes")
