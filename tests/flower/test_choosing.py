"""Which round is best and when it is enough. Kind of evidence: *exact* (lines written by hand, decided by hand)."""

from __future__ import annotations

from typing import Any

import pytest

from fedlora.flower.rounds.choosing import Choosing
from fedlora.runs.stopping import Patience


def by_server(*scores: float | None) -> list[dict[str, Any]]:
    """None: the round was not measured."""
    lines = enumerate(scores, start=1)
    return [{"round": k, "metrics": {} if s is None else {"accuracy": s}} for k, s in lines]


def by_sites(*rounds: dict[str, tuple[float, int]]) -> list[dict[str, Any]]:
    lines = []
    for k, sites in enumerate(rounds, start=1):
        total = sum(n for _, n in sites.values())
        mean = {"accuracy": sum(s * n for s, n in sites.values()) / total, "examples": total} if sites else {}
        said = {name: {"accuracy": s, "examples": n} for name, (s, n) in sites.items()}
        lines.append({"round": k, "metrics": {}, "site_metrics": said, "site_mean": mean})
    return lines


def best(choosing: Choosing, lines: list[dict[str, Any]]) -> int | None:
    found = choosing.best(lines)
    return None if found is None else int(found["round"])


@pytest.mark.parametrize(
    ("metric", "scores", "want"),
    [
        ("accuracy", (0.5, 0.7, 0.6), 2),
        ("accuracy", (0.5, 0.7, 0.7), 2),  # the first of equals, as in `fedlora run`
        ("accuracy", (None, None), None),
        ("accuracy", (None, 0.3, None), 2),
    ],
)
def test_the_best_round_by_the_server(metric: str, scores: tuple[float | None, ...], want: int | None) -> None:
    assert best(Choosing(metric, "server"), by_server(*scores)) == want


def test_a_score_that_is_null_in_the_file_is_worse_than_any() -> None:
    lines = by_server(0.1, 0.2, 0.15)
    lines[1]["metrics"]["accuracy"] = None  # NaN, as JSON has it
    assert best(Choosing("accuracy", "server"), lines) == 3


def test_the_weights_are_the_examples() -> None:
    """0.9 and 0.1 of 10 and 30 examples: 0.3; 0.1 and 0.9: 0.7."""
    lines = by_sites({"a": (0.9, 10), "b": (0.1, 30)}, {"a": (0.1, 10), "b": (0.9, 30)})
    assert best(Choosing("accuracy", "sites"), lines) == 2 and best(Choosing("loss", "sites"), lines[:0]) is None


def test_patience_counts_what_was_measured() -> None:
    choosing, patience = Choosing("accuracy", "sites"), Patience(2, 0.05)
    one = {"a": (0.5, 10)}
    lines = by_sites(one, {}, {"a": (0.54, 10)}, {}, {"a": (0.545, 10)}, {"a": (0.9, 10)})
    stopped = choosing.stop(lines, 9, patience)
    assert stopped is not None and (stopped["round"], stopped["best_round"], stopped["best"]) == (5, 1, 0.5)
    assert "2 evaluations at the sites" in stopped["why"]
    assert choosing.stop(lines[:4], 9, patience) is None and choosing.stop(lines, 9, None) is None
    server = Choosing("accuracy", "server").stop(by_server(0.5, 0.5, 0.5), 9, patience)
    assert server is not None and "at the server" in server["why"] and server["round"] == 3
