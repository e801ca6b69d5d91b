"""Which round is best and when it is enough. Kind of evidence: *exact* (lines written by hand, decided by hand)."""

from __future__ import annotations

from typing import Any

import pytest

from fedlora.flower.rounds.choosing import Choosing
from fedlora.runs.stopping import Patience


def lines_by(by: Any, *scores: float | None) -> list[dict[str, Any]]:
    """None: the round was not measured."""
    of = "metrics" if by == "server" else "site_mean"
    lines = enumerate(scores, start=1)
    return [{"round": k, "metrics": {}, of: {} if s is None else {"accuracy": s}} for k, s in lines]


def best(choosing: Choosing, lines: list[dict[str, Any]]) -> int | None:
    found = choosing.best(lines)
    return None if found is None else int(found["round"])


@pytest.mark.parametrize("by", ["server", "sites"])
@pytest.mark.parametrize(
    ("scores", "want"),
    [
        ((0.5, 0.7, 0.6), 2),
        ((0.5, 0.7, 0.7), 2),  # the first of equals, as in `fedlora run`
        ((None, None), None),
        ((None, 0.3, None), 2),
    ],
)
def test_the_best_round(by: Any, scores: tuple[float | None, ...], want: int | None) -> None:
    assert best(Choosing("accuracy", by), lines_by(by, *scores)) == want


def test_a_score_that_is_null_in_the_file_is_worse_than_any() -> None:
    lines = lines_by("server", 0.1, 0.2, 0.15)
    lines[1]["metrics"]["accuracy"] = None  # NaN, as JSON has it
    assert best(Choosing("accuracy", "server"), lines) == 3


def test_patience_counts_what_was_measured() -> None:
    choosing, patience = Choosing("accuracy", "sites"), Patience(2, 0.05)
    lines = lines_by("sites", 0.5, None, 0.54, None, 0.545, 0.9)
    stopped = choosing.stop(lines, 9, patience)
    assert stopped is not None and (stopped["round"], stopped["best_round"], stopped["best"]) == (5, 1, 0.5)
    assert "2 evaluations at the sites" in stopped["why"]
    assert choosing.stop(lines[:4], 9, patience) is None and choosing.stop(lines, 9, None) is None
    server = Choosing("accuracy", "server").stop(lines_by("server", 0.5, 0.5, 0.5), 9, patience)
    assert server is not None and "at the server" in server["why"] and server["round"] == 3
