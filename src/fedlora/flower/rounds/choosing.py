"""Decides which round is the best, and when to stop, only from the lines of rounds.jsonl.

So a federation that was killed and continues decides as if it had not been. Scores are the server's, on its validation
file, or otherwise the sites', each on its held-out data. With sites' scores, two rounds are compared on the sites that
measured both, weighted by the examples that they count for, none by more than its share: an absent site makes a round
neither better nor worse, and one that claims a billion examples decides nothing alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fedlora.runs.stopping import Patience
from fedlora.server.closing import held_to_share
from fedlora.training.metrics import is_better

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Choosing:
    """The comparison of rounds. metric: a score's name. by: whose scores."""

    metric: str
    by: Literal["server", "sites"]

    def score(self, line: Line) -> float | None:
        """A round's own score: the server's, or the sites' weighted mean. None if it was not measured."""
        scores: Mapping[str, Any] = line.get("metrics" if self.by == "server" else "site_mean") or {}
        value = scores.get(self.metric)
        return math.nan if value is None and scores else value  # NaN is null in a file

    def better(self, line: Line, best: Line | None, *, by: float = 0.0) -> bool:
        """Whether a round is better than the previous best by more than `by`."""
        scores = self._scores(line, best)
        return scores is not None and is_better(self.metric, *scores, by=by)

    def replaces(self, line: Line, best: Line | None) -> bool:
        """Whether a round becomes the best: better than the previous best, or equal, because it was trained longer."""
        scores = self._scores(line, best)
        new, old = scores or (None, None)
        if new is None or best is None:
            return new is not None
        return is_better(self.metric, new, old) or not (math.isnan(new) or is_better(self.metric, old, new))

    def _scores(self, line: Line, best: Line | None) -> tuple[float | None, float | None] | None:
        """A round's score and the previous best's, on the sites that measured both, weighted by their current counts.
        None if no such site is known."""
        if best is None or self.by == "server":
            return self.score(line), None if best is None else self.score(best)
        new, old = line["site_metrics"], best["site_metrics"]
        both = {site for site in new if all(of.get(site, {}).get(self.metric) is not None for of in (new, old))}
        counts = {site: n for site, n in (line.get("site_counts") or {}).items() if n > 0 and site in both}
        if not counts:  # the best may have been measured by another metric, and any number is better than none
            before = self.score(best)
            return (self.score(line), before) if before is None or math.isnan(before) else None
        weights = held_to_share(counts, line["site_share"])
        total = math.fsum(weights.values())
        after, before = (
            math.fsum(said[site][self.metric] * n for site, n in weights.items()) / total for said in (new, old)
        )
        return after, before

    def best(self, lines: Sequence[Line]) -> Line | None:
        """The best round's line, the last of equals; None if none was measured."""
        best: Line | None = None
        for line in lines:
            if self.replaces(line, best):
                best = line
        return best

    def stop(self, lines: Sequence[Line], rounds: int, patience: Patience | None) -> dict[str, Any] | None:
        """Where and why the federation ends early, or None."""
        if patience is None:
            return None
        where = "at the server" if self.by == "server" else "at the sites"
        return patience.stop(lines, rounds, score=self.score, better=self.better, where=where)


__all__ = ["Choosing"]
