"""Early stopping: whether a run has seen enough, read from the scores of its rounds alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fedlora.training.metrics import is_better


@dataclass(frozen=True)
class Patience:
    """Stop after `evaluations` in a row that are not better, by more than `min_delta`, than the best one before them.

    every: rounds between evaluations. What was measured in between, as the last round of a run that was then extended,
    does not count, so that the longer run stops where it would have stopped from the start. A score that is no number
    (NaN, a diverged run) is not better either.
    """

    metric: str
    evaluations: int
    min_delta: float = 0.0
    every: int = 1

    def stop(self, lines: Iterable[Mapping[str, Any]], rounds: int) -> dict[str, Any] | None:
        """Where and why a run ends before its time, or None: what summary.json says as "stopped_early".

        Args:
            lines: a run's rounds as metrics.jsonl has them, from the first on. Nothing else counts, so that a run which
                was killed and resumed stops where it would have stopped. rounds: that it may last.
        """
        best: float | None = None
        since, best_round = 0, None
        for line in lines:
            if not line["metrics"] or (line["round"] % self.every and line["round"] != rounds):
                continue
            score = line["metrics"][self.metric]
            if is_better(self.metric, score, best, by=self.min_delta):
                best, best_round, since = score, line["round"], 0
                continue
            since += 1
            if since >= self.evaluations and line["round"] < rounds:
                return {
                    "round": line["round"], "of": rounds, "best_round": best_round, "best": best,
                    "why": self._why(best_round),
                }  # fmt: skip
        return None

    def _why(self, best_round: int | None) -> str:
        if best_round is None:
            return f"{self.evaluations} evaluations on validation in which {self.metric} was no number"
        more = f" by more than {self.min_delta:g}" if self.min_delta else ""
        return (
            f"{self.evaluations} evaluations on validation in a row without a better {self.metric} than round "
            f"{best_round}'s{more}"
        )
