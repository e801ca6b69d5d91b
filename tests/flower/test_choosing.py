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
    """Who measured in an earlier round is away in a later one."""
    lines, members = [], set[str]()
    for k, sites in enumerate(rounds, start=1):
        total = sum(n for _, n in sites.values())
        mean = {"accuracy": sum(s * n for s, n in sites.values()) / total, "examples": total} if sites else {}
        said = {name: {"accuracy": s, "examples": n} for name, (s, n) in sites.items()}
        counts = {name: float(n) for name, (_, n) in sites.items()}
        members |= {*sites}
        away = dict.fromkeys(members - {*sites}, "it is not online")
        more = {"site_counts": counts, "site_unmeasured": away}
        lines.append({"round": k, "metrics": {}, "site_metrics": said, "site_mean": mean, **more})
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


def test_a_site_that_is_away_makes_a_round_neither_better_nor_worse() -> None:
    """Site b is bad and away in round 2: the mean of round 2 is the highest, and round 3 is the best."""
    lines = by_sites(
        {"a": (0.8, 10), "b": (0.2, 30)},
        {"a": (0.8, 10)},
        {"a": (0.82, 10), "b": (0.3, 30)},
        {"b": (0.25, 30)},
    )
    assert lines[1]["site_mean"]["accuracy"] > lines[2]["site_mean"]["accuracy"]
    assert best(Choosing("accuracy", "sites"), lines) == 3
    assert best(Choosing("accuracy", "sites"), by_sites({"a": (0.1, 5)}, {"b": (0.9, 5)})) == 1, "nothing in common"
    assert best(Choosing("accuracy", "sites"), by_sites({}, {"b": (0.9, 5)})) == 2


def test_the_metric_may_change_between_rounds() -> None:
    """Rounds before have no number of it, and a site may lack one that the other has: only what both measured twice is
    compared, and any number is better than none."""
    lines = by_sites({"a": (0.9, 10), "b": (0.9, 10)}, {"a": (0.2, 10), "b": (0.2, 10)}, {"a": (0.4, 10)})
    for site, line, f1 in (("a", 1, 0.3), ("b", 1, 0.7), ("a", 2, 0.4)):
        lines[line]["site_metrics"][site]["macro_f1"] = f1
    for line, mean in ((1, 0.5), (2, 0.4)):
        lines[line]["site_mean"]["macro_f1"] = mean
    del lines[1]["site_metrics"]["b"]["macro_f1"]  # NaN there
    assert best(Choosing("macro_f1", "sites"), lines[:2]) == 2
    assert best(Choosing("macro_f1", "sites"), lines) == 3, "0.4 is better than 0.3 at a, which alone measured both"


def test_the_weights_are_the_examples() -> None:
    """0.9 and 0.1 of 10 and 30 examples: 0.3; 0.1 and 0.9: 0.7."""
    lines = by_sites({"a": (0.9, 10), "b": (0.1, 30)}, {"a": (0.1, 10), "b": (0.9, 30)})
    assert best(Choosing("accuracy", "sites"), lines) == 2 and best(Choosing("loss", "sites"), lines[:0]) is None


def test_one_site_chooses_no_round_by_claiming_many_examples() -> None:
    """Two of three got worse. The third claims 10^12 examples of 1.0, and is known to have 8: its third of 24 examples
    decides nothing (before it, 0.6; after, (2 * 0.3 + 0.88) / 3 = 0.49)."""
    lines = by_sites(
        {"a": (0.6, 8), "b": (0.6, 8), "forger": (0.6, 8)},
        {"a": (0.3, 8), "b": (0.3, 8), "forger": (0.88, 8)},
    )
    lines[1]["site_metrics"]["forger"]["examples"] = 10**12
    assert best(Choosing("accuracy", "sites"), lines) == 1
    lines[1]["site_metrics"] = {name: {"accuracy": 0.99, "examples": 8} for name in ("a", "b", "forger")}
    assert best(Choosing("accuracy", "sites"), lines) == 2
    del lines[1]["site_counts"]  # of a line that says nothing of them, nothing is known
    assert best(Choosing("accuracy", "sites"), lines) == 1


def test_patience_counts_what_was_measured() -> None:
    choosing, patience = Choosing("accuracy", "sites"), Patience(2, 0.05)
    one = {"a": (0.5, 10)}
    lines = by_sites(one, {}, {"a": (0.54, 10)}, {}, {"a": (0.545, 10)}, {"a": (0.9, 10)})
    stopped = choosing.stop(lines, 9, patience)
    assert stopped is not None and (stopped["round"], stopped["best_round"], stopped["best"]) == (5, 1, 0.5)
    assert "2 evaluations at the sites" in stopped["why"]
    assert choosing.stop(lines[:4], 9, patience) is None and choosing.stop(lines, 9, None) is None
    others = by_sites({"a": (0.54, 9)}, *({"b": (0.5 + 0.01 * k, 9)} for k in range(4)), {"a": (0.4, 9)})
    assert choosing.stop(others, 9, patience) is None  # only one round can be compared with the best; before, it ended
    assert best(choosing, others) == 1
    for line in others[1:]:
        line["site_unmeasured"] = {}  # a has left: it will never measure again
    assert best(choosing, others[:5]) == 5
    server = Choosing("accuracy", "server").stop(by_server(0.5, 0.5, 0.5), 9, patience)
    assert server is not None and "at the server" in server["why"] and server["round"] == 3
