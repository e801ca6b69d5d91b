"""The numbers that runs are compared by: each has a name, such as "test, best" or "rounds to 0.92".

All use `evaluate.metric`. "best" is at the best validation round, "last" at the last one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fedlora.errors import ConfigError
from fedlora.runs.config import RunConfig
from fedlora.training.metrics import find_metric, is_better

Line = Mapping[str, Any]  # of results (`results`)
PROBES = ("unseen", "validation_mismatched")  # superni's tasks that nobody trains on; mnli's second test set
KNOWN = (
    "test, best", "test, last", "validation, best", "validation, last", "rounds to X", "clients, last",
    *(f"{probe}, {when}" for probe in PROBES for when in ("best", "last")),
)  # fmt: skip


@dataclass(frozen=True)
class Number:
    """A parsed name. where: "test", "validation", "clients", "rounds" or a further test set. what: "best" or "last".
    target: the X of "rounds to X"."""

    name: str
    where: str
    what: str = ""
    target: float = 0.0

    @property
    def of_rounds(self) -> bool:
        return self.where == "rounds"

    def larger_is_better(self, metric: str) -> bool:
        return not self.of_rounds and find_metric(metric).larger_is_better

    def of(self, line: Line) -> float:
        """The number of a run; NaN if it has none: it failed, diverged, never got there, or did not measure it."""
        metric = line.get("metric")
        if metric is None:
            return math.nan
        if self.of_rounds:
            history = line["history"]
            each = zip(history["evaluated"], history["scores"].get(metric, []), strict=True)
            reached = (t for t, x in each if x is not None and not is_better(metric, self.target, x))
            return float(next(reached, math.nan))
        if self.where == "clients":
            own = [_number(scores.get(metric)) for scores in line["clients_at_end"].values()]
            return fmean(own) if own else math.nan
        return _number(self.scores(line).get(metric))

    def scores(self, line: Line) -> Mapping[str, float | None]:
        """All scores on the held-out set of this number; empty if it was not measured."""
        if self.where in ("test", "validation"):
            return dict(line[self.where].get(self.what) or {})
        return dict(line["probes"].get(self.what, {}).get(self.where, {}))

    def on_own_data(self, line: Line) -> bool:
        """Whether it is of clients' own models, each on its own client's data, which no server's score is compared
        with."""
        return line.get("target") == "clients" and self.where in line.get("own_data", ())


def parse_number(name: str) -> Number:
    """The number with this name. Raises `ConfigError`, which lists all names, for an unknown one."""
    if match := re.fullmatch(r"rounds to ([-+]?\d*\.?\d+(?:e[-+]?\d+)?)", name):  # Matthews correlation can be negative
        return Number(name, "rounds", target=float(match[1]))
    if name in KNOWN and not name.endswith(" X"):
        where, what = name.split(", ")
        return Number(name, where, what)
    raise ConfigError(
        f"no number of a run is called {name!r}; there are: {'; '.join(KNOWN)}. X is a value of evaluate.metric, as in "
        f"'rounds to 0.92'."
    )


def own_data(config: RunConfig) -> list[str]:
    """The held-out sets that are each client's own, in runs of this configuration."""
    data = config.data
    apart = data.task == "superni" or bool(data.clients)
    found = [part for part in ("validation", "test") if apart and not isinstance(getattr(data, part), str)]
    return sorted({*found, *(["test"] if config.clients.test_fraction is not None else [])})


def _number(value: float | None) -> float:
    return math.nan if value is None else value


# A metric's name in scores -> the metric with its unit, as in tables of scores.
SCALES = {
    "loss": "log-loss in nats",
    "perplexity": "perplexity (1 is perfect)",
    "accuracy": "accuracy (0 to 1)",
    "macro_f1": "macro F1 (0 to 1)",
    "exact_match": "share of exact matches (0 to 1)",
    "rouge_l": "ROUGE-L (0 to 1)",
    "rouge_l_teacher_forced": "ROUGE-L, teacher-forced (0 to 1)",
}
