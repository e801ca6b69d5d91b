"""Which of a run's rounds is the best, and whether to stop early: decided from the scores in the rounds' lines, so
that a run that was killed and resumed decides as if it had not been.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fedlora.training.metrics import is_better

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Patience:
    """Stop after `evaluations` in a row that do not improve on the best one before them by more than `threshold`.

    every: rounds between evaluations. Measurements in between, such as the last round of a run that was then extended,
    do not count, so that the longer run stops where it would have stopped from the start. A score that is NaN (a
    diverged run) is no improvement either.
    """

    evaluations: int
    threshold: float = 0.0
    every: int = 1


@dataclass(frozen=True)
class Ranking:
    """The order of a run's rounds. metric: the name of a score in a line's "metrics"."""

    metric: str

    @property
    def where(self) -> str:
        """Where rounds are measured, for messages."""
        return "on validation"

    def score(self, line: Line) -> float | None:
        """A round's score. None if it was not measured."""
        return self._of(line["metrics"])

    def better(self, line: Line, best: Line | None, *, by: float = 0.0) -> bool:
        """Whether `line` is better than `best` (None: there is none yet) by more than `by`."""
        return is_better(self.metric, self.score(line), None if best is None else self.score(best), by=by)

    def best(self, lines: Iterable[Line]) -> Line | None:
        """The best round's line, the first of equals; None if none was measured."""
        best: Line | None = None
        for line in lines:
            if self.better(line, best):
                best = line
        return best

    def stop(self, lines: Iterable[Line], rounds: int, patience: Patience | None) -> dict[str, Any] | None:
        """Where and why a run ends early, or None: the entry "stopped_early" in summary.json. lines: its rounds, from
        the first on. rounds: the planned number."""
        if patience is None:
            return None
        best: Line | None = None
        since = 0
        for line in lines:
            if self.score(line) is None or (line["round"] % patience.every and line["round"] != rounds):
                continue
            if self.better(line, best, by=patience.min_delta):
                best, since = line, 0
                continue
            since += 1
            if since >= patience.evaluations and line["round"] < rounds:
                best_round = None if best is None else best["round"]
                return {
                    "round": line["round"], "of": rounds, "best_round": best_round,
                    "best": None if best is None else self.score(best), "why": self._why(best_round, patience),
                }  # fmt: skip
        return None

    def _of(self, scores: Mapping[str, Any]) -> float | None:
        value = scores.get(self.metric)
        return math.nan if value is None and scores else value  # NaN is null in a file

    def _why(self, best_round: int | None, patience: Patience) -> str:
        looked = f"{patience.evaluations} evaluations {self.where}"
        if best_round is None:
            return f"{looked} in which {self.metric} was not a number"
        more = f" by more than {patience.min_delta:g}" if patience.min_delta else ""
        return f"{looked} in a row without a better {self.metric} than round {best_round}'s{more}"
