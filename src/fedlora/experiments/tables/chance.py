"""What guessing would score: the line that every score is read against, where a metric has one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedlora.experiments.stored.results import Result
from fedlora.training.metrics import by_guessing


def chance(result: Result, metric: str | None = None) -> float | None:
    """`by_guessing` of the result's own metric, or of another; None also where it names no classes."""
    return by_guessing(metric or result.metric, _classes(result.raw))


def _classes(raw: Mapping[str, Any]) -> int:
    told = (raw.get("confusion") or {}).get("classes")
    if told:
        return len(told)
    counts = ((raw.get("data") or {}).get("label_counts") or {}).values()  # of results before confusions were kept
    return max(map(len, counts), default=0)
