"""Early stopping, decided from the scores of a run's rounds alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fedlora.training.metrics import is_better


class Better(Protocol):
    """Compares two rounds."""

    def __call__(self, line: Mapping[str, Any], best: Mapping[str, Any] | None, *, by: float) -> bool:
        """Whether `line` is better than `best` (None: there is none yet) by more than `by`."""


@dataclass(frozen=True)
class Patience:
    """Stop after `evaluations` in a row that do not improve on the best one before them by more than `min_delta`.

    every: rounds between evaluations. Measurements in between, such as the last round of a run that was then extended,
    do not count, so that the longer run stops where it would have stopped from the start. A score that is NaN (a
    diverged run) is no improvement either.
    """

    metric: str
    evaluations: int
    min_delta: float = 0.0
    every: int = 1

    def stop(
        self,
        lines: Iterable[Mapping[str, Any]],
        rounds: int,
        *,
        score: Callable[[Mapping[str, Any]], float | None] | None = None,
        better: Better | None = None,
        where: str = "on validation",
    ) -> dict[str, Any] | None:
        """Where and why a run ends early, or None: the entry "stopped_early" in summary.json.

        Args:
            lines: a run's rounds from metrics.jsonl, from the first on. Nothing else counts, so that a run that was
                killed and resumed stops where it would have stopped. rounds: the planned number.
            score: a round's, None if it was not measured; default: the metric in its line's "metrics".
            better: whether a round is better than the best before it; default: by that score. where: for the message.
        """
        score = score or self._score
        better = better or self._better
        best: Mapping[str, Any] | None = None
        since = 0
        for line in lines:
            if score(line) is None or (line["round"] % self.every and line["round"] != rounds):
                continue
            if better(line, best, by=self.min_delta):
                best, since = line, 0
                continue
            since += 1
            if since >= self.evaluations and line["round"] < rounds:
                best_round = None if best is None else best["round"]
                return {
                    "round": line["round"], "of": rounds, "best_round": best_round,
                    "best": None if best is None else score(best), "why": self._why(best_round, where),
                }  # fmt: skip
        return None

    def _score(self, line: Mapping[str, Any]) -> float | None:
        if not line["metrics"]:
            return None
        value = line["metrics"][self.metric]
        return math.nan if value is None else float(value)

    def _better(self, line: Mapping[str, Any], best: Mapping[str, Any] | None, *, by: float) -> bool:
        return is_better(self.metric, self._score(line), None if best is None else self._score(best), by=by)

    def _why(self, best_round: int | None, where: str) -> str:
        if best_round is None:
            return f"{self.evaluations} evaluations {where} in which {self.metric} was not a number"
        more = f" by more than {self.min_delta:g}" if self.min_delta else ""
        return (
            f"{self.evaluations} evaluations {where} in a row without a better {self.metric} than round "
            f"{best_round}'s{more}"
        )
