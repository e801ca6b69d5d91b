"""What guessing would score: the line that every score is read against, where a metric has one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedlora.experiments.results import Result


def chance(result: Result, metric: str | None = None) -> float | None:
    """The score of who says each of K classes with probability 1 / K: ln K of log-loss, 1 / K of accuracy, 0 of
    Matthews correlation. None for other metrics, and where a result names no classes."""
    metric, count = metric or result.metric, _classes(result.raw)
    if metric == "matthews":
        return 0.0
    if count < 2:
        return None
    return {"loss": math.log(count), "accuracy": 1 / count, "balanced_accuracy": 1 / count}.get(metric)


def _classes(raw: Mapping[str, Any]) -> int:
    told = (raw.get("confusion") or {}).get("classes")
    if told:
        return len(told)
    counts = ((raw.get("data") or {}).get("label_counts") or {}).values()  # of results before confusions were kept
    return max(map(len, counts), default=0)
