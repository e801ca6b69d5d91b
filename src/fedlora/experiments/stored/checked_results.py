"""What a stored result has to be, checked once, where it is read and where it is written.

Its name is recomputed from its configuration. Its scores are numbers that such scores can be, and agree with each other
where one follows from another. What was measured on the test set follows from nothing else in the file: that it was not
changed is for the history of the repository to show.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError, model_validator

from fedlora.experiments.stored.stored_json import Stored, shown, wrong_values
from fedlora.runs.config import RunConfig
from fedlora.runs.own_files import digest_of
from fedlora.training.metrics import score_name

# Defaults that were written out with every configuration, and are written otherwise now.
_FORMERLY_WRITTEN = {("attack", "space"): "update"}
_FLOAT32 = 3.5e38  # what training computes in holds no more
_SHARES = {
    "accuracy", "balanced_accuracy", "macro_f1", "rouge_l", "exact_match", "rouge_l_teacher_forced", "recall",
}  # fmt: skip
_RANGES = {"matthews": (-1.0, 1.0), "loss": (0.0, _FLOAT32), "perplexity": (0.0, 1.8e308)}


def _name(text: str) -> str:
    if not text.isprintable() or len(text) > 200:
        raise ValueError(f"{shown(text)} is no name on one line")
    return text


def _line(text: str) -> str:
    if any(sign in text for sign in "<>|`"):  # pages show it as it is
        raise ValueError(f"{shown(text)} is no word or two")
    return _name(text)


def _scores(scores: dict[str, float | None]) -> dict[str, float | None]:
    """Each in the range of its kind. None: it diverged."""
    for name, value in scores.items():
        kind = name.partition("/")[0]
        low, high = _RANGES.get(kind, (0.0, 1.0) if kind in _SHARES else (-1.8e308, 1.8e308))
        if value is not None and not low <= value <= high:
            raise ValueError(f"{name} = {shown(value)}, and such a score is between {low:g} and {high:g}")
    return scores


Name = Annotated[str, AfterValidator(_name)]
Line = Annotated[str, AfterValidator(_line)]
Scores = Annotated[dict[Name, float | None], AfterValidator(_scores)]
Size = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]


class Commit(Stored):
    """Of a checkout. clean: without local changes."""

    id: Annotated[str, Field(pattern="^[0-9a-f]{7,64}$")]
    clean: bool


class Machine(Stored):
    device: Line
    architecture: Line
    cpus: int | None
    threads: int | None


class Part(Stored):
    """What computed a part of a result: the rounds after `after`. machine: None where an older version did not note
    it."""

    after: Count
    commit: Commit | None
    machine: Machine | None


class Merged(Stored):
    """What one merger made. strength, strengths_tried: C of a head, and the ends of its grid. commit, machine: not
    there in results of before they were noted."""

    merger: dict[str, Any]
    test: Scores
    validation: Scores = Field(default_factory=dict)
    norm: Size | None = None
    error: Size | None = None
    rank: Count | None = None
    strength: Size | None = None
    strengths_tried: Annotated[list[Size], Field(min_length=2, max_length=2)] = Field(default_factory=list)
    commit: Commit | None = None
    machine: Machine | None = None


class Round(Stored):
    round: Count
    metrics: Scores
    losses: dict[Name, float | None]


class Times(Stored):
    """Of the round that is best on validation, and of the last one."""

    best: Scores
    last: Scores


class Probes(Stored):
    best: dict[Name, Scores]
    last: dict[Name, Scores]


class Spent(Stored):
    epsilon_planned: Size | None
    delta: Annotated[float, Field(ge=0, le=1)]
    noise_multiplier: Size
    sampling: Annotated[float, Field(ge=0, le=1)]
    rounds_planned: Count
    clip: Size


class Confusion(Stored):
    """last: after the last round on the test set; a row is a true class."""

    classes: list[str]
    last: list[list[Count]] | None = None

    @property
    def accuracy(self) -> float | None:
        total = sum(map(sum, self.last or []))
        return sum(row[k] for k, row in enumerate(self.last or []) if k < len(row)) / total if total else None


class Data(Stored):
    label_counts: dict[str, list[int]] | None = None


class ResultFile(Stored):
    """One file. padded_error, gauge_drift: of the last round, relative."""

    digest: str
    config: dict[str, Any]
    files: dict[str, str] = Field(default_factory=dict)
    method: Line
    metric: Line
    target: Line
    rounds: Count | None = None
    best_round: Count | None = None
    history: list[Round]
    validation: Times
    test: Times
    probes: Probes
    clients_at_end: dict[Name, Scores]
    categories: dict[Name, Name]
    ranks: dict[Name, int | str]
    bytes: dict[str, Count]
    wall_seconds: Size
    padded_error: Size | None = None
    gauge_drift: dict[str, Size | None] | None = None
    confusion: Confusion | None = None
    data: Data | None = None
    privacy: Spent | None = None
    commit: Commit | None
    machine: Machine
    versions: dict[Name, Line] = Field(default_factory=dict)
    parts: list[Part] | None = None
    mergers: dict[str, Merged] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _agrees(self) -> ResultFile:
        """Whatever follows from something else in the file."""
        config = _config(json.dumps(self.config))
        digests = _digests(json.dumps(self.config), json.dumps(self.files))
        if self.digest not in digests:
            raise ValueError(
                f"digest is {shown(self.digest)}, and that of its configuration is {digests[0]}: one of the two was "
                f"changed"
            )
        _same("metric", self.metric, score_name(config.evaluate.metric), "evaluate.metric of its configuration")
        _same("method", self.method, config.method.name, "its configuration's")
        _same("privacy", self.privacy is not None, config.privacy is not None, "whether its configuration has it")
        numbers = [line.round for line in self.history]
        _same("the rounds of history", numbers, list(range(1, len(numbers) + 1)), "the numbers of its lines")
        if self.rounds is not None:
            _same("rounds", self.rounds, len(self.history), "the length of history")
        self._scores_agree()
        self._parts_agree()
        if self.bytes and "total" not in self.bytes:
            raise ValueError("bytes.total is missing")
        return self

    def _scores_agree(self) -> None:
        measured = {line.round: line.metrics for line in self.history if line.metrics}
        lacking = [number for number, scores in measured.items() if self.metric not in scores]
        if lacking:
            raise ValueError(f"history: round {lacking[0]} has scores and no {self.metric}")
        last, best = (scores.get(self.metric) for scores in (self.validation.last, self.validation.best))
        if measured:
            _same(f"validation.last.{self.metric}", last, measured[max(measured)][self.metric], "that of history")
        if self.best_round in measured:
            _same(f"validation.best.{self.metric}", best, measured[self.best_round][self.metric], "that of best_round")
        if self.best_round == len(self.history) and self.history:
            _same("test.best", self.test.best, self.test.last, "test.last, of the same round,")
        counted = None if self.confusion is None else self.confusion.accuracy
        told = self.test.last.get("accuracy")
        if counted is not None and told is not None and abs(counted - told) > 1e-5:
            raise ValueError(f"test.last.accuracy is {told:g}, and confusion.last counts {counted:g}")

    def _parts_agree(self) -> None:
        if self.parts is None:
            return
        if not self.parts or self.parts[0].after != 0:
            raise ValueError("parts: the first one starts before round 1 (after = 0)")
        clean = all(part.commit is not None and part.commit.clean for part in self.parts)
        if self.commit is not None and self.commit.clean and not clean:
            raise ValueError("commit.clean is true, and a part of it (parts) is of a changed checkout")


def check_result(raw: Mapping[str, Any]) -> None:
    """Raises `ValueError`, with keys and values, for what no result is."""
    try:
        ResultFile.model_validate(raw)
    except ValidationError as error:
        raise ValueError(wrong_values(error)) from error


def _same(what: str, there: object, here: object, which: str) -> None:
    if there != here:
        raise ValueError(f"{what} is {shown(there)}, and {which} is {shown(here)}")


@functools.lru_cache(maxsize=4096)
def _config(text: str) -> RunConfig:
    raw = json.loads(text)
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        wrong = re.sub(r"\s+", " ", wrong_values(error))
        raise ValueError(f"config is no configuration of this version of fedlora ({wrong})") from error


@functools.lru_cache(maxsize=4096)
def _digests(text: str, files: str) -> tuple[str, ...]:
    """Of the configuration as it is, and with former defaults as they are written now."""
    told = json.loads(text)
    for (table, key), former in _FORMERLY_WRITTEN.items():
        if isinstance(told.get(table), dict) and told[table].get(key) == former:
            told[table][key] = None
    configs = dict.fromkeys((text, json.dumps(told)))
    return tuple(dict.fromkeys(digest_of(_config(each), json.loads(files)) for each in configs))
