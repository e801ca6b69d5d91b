"""Measurements in words: scores, and classes by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedlora.training.metrics import worst_of

_NAMED_CLASSES = 8  # the most classes in a column's title


def number(score: float | None) -> str:
    """A score in three digits; "no number" for None (null in a file)."""
    return "no number" if score is None else f"{score:.3f}"


def byte_size(count: float) -> str:
    """Bytes in a readable unit: 999 bytes, 30.2 KB, 1.5 MB."""
    if count < 1e3:
        return f"{count:.0f} bytes"
    return f"{count / 1e3:.1f} KB" if count < 1e6 else f"{count / 1e6:.1f} MB"


def megabytes(count: float) -> str:
    """Bytes as MB for a column: 14.1; below 1 MB 0.023, because one digit would show 0.0."""
    return f"{count / 1e6:.1f}" if count >= 1e6 else f"{count / 1e6:.3f}"


def label_title(names: Sequence[str]) -> str:
    """The title of a column of `label_cell`s."""
    return " / ".join(names) if 0 < len(names) <= _NAMED_CLASSES else "by label"


def label_cell(counts: Sequence[int], names: Sequence[str]) -> str:
    """A client's examples of each class, in the title's order; if there are many classes, only the largest."""
    counts = [*counts, *[0] * (len(names) - len(counts))]  # classes above the largest with examples
    if len(names) <= _NAMED_CLASSES:
        return " / ".join(map(str, counts))
    largest = sorted(range(len(names)), key=lambda k: -counts[k])[:2]
    most = ", ".join(f"{names[k]} {counts[k]}" for k in largest if counts[k])
    return f"{sum(n > 0 for n in counts)} of {len(names)} classes, most: {most}"


def other_scores(scores: Mapping[str, float | None], metric: str) -> str:
    """All scores except the metric and details, such as "macro f1 0.612, loss 0.904"."""
    shown = {name: score for name, score in scores.items() if "/" not in name and name not in (metric, "worst")}
    return ", ".join(f"{name.replace('_', ' ')} {number(score)}" for name, score in shown.items())


def worst_client(each: Mapping[str, Mapping[str, float | None]], metric: str) -> str:
    """The client with the worst readout, and its score."""
    worst = worst_of(metric, list(each), lambda client: each[client][metric])
    return "" if worst is None else f"{worst}, {number(each[worst][metric])}"
