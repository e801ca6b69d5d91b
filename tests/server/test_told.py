"""What is told of a robust rule: lines for a screen. Kind: unit, expected words by hand."""

from __future__ import annotations

import re
from typing import Any

from fedlora.server.judged import of_run, remarks, told


def line(rule: str, facts: dict[str, float] | None = None, **after: float) -> dict[str, Any]:
    """after: of clients that have the same weight before."""
    clients = {n: {"before": 1 / len(after), "after": a, "why": "", "norm": 1.0} for n, a in after.items()}
    return {"rule": rule, "facts": facts or {}, "clients": clients}


def test_the_norm_that_was_used_is_in_the_line() -> None:
    said = told(line("clip (threshold = median)", {"threshold": 0.50571}, a=0.5, b=0.26))
    assert re.match(r"clip \(norms .*0\.5057\) .* b to 52%", said)
    assert told(line("clip (threshold = median)", {"threshold": 0.5}, a=0.5, b=0.5)) == ""


def test_who_is_raised_is_told_where_others_are_not() -> None:
    """Under a geometric median one of four has 46 % instead of 25 %. If all kept clients gain equally, as with
    multi-krum, the log names only those left out."""
    said = told(line("geometric-median (tolerance = 1e-10)", a=0.46, b=0.27, c=0.27, d=0.0))
    assert re.fullmatch(r"geometric-median leaves out d \(1 of 4\) .* a to 184%", said)
    assert told(line("multi-krum (liars = 1)", a=1 / 3, b=1 / 3, c=1 / 3, d=0.0)) == "multi-krum leaves out d (1 of 4)"
    assert told(line("krum (liars = 1)", a=1.0, b=0.0, c=0.0, d=0.0)) == "krum leaves out b, c, d (3 of 4)"


def test_where_most_are_left_out_those_who_stay_are_told() -> None:
    said = told(line("krum (liars = 1)", **{f"c{k:02}": float(k == 7) for k in range(30)}))
    assert said == "krum keeps c07 alone (1 of 30)"


def test_who_is_raised_most_is_told_first() -> None:
    said = told(line("geometric-median", a=0.25, b=0.35, c=0.16, d=0.16, e=0.08, f=0.0))
    assert 0 < said.index("b to 210%") < said.index("a to 150%")


def test_somebody_should_look_at_who_always_loses() -> None:
    """Left out in every round, or below 60 % of its weight; a rank that is the largest is named as a likely cause."""
    rounds = [{"defence": line("multi-krum (liars = 1)", a=0.0, b=0.375, c=0.1, d=0.525)} for _ in range(3)]
    first, second = remarks(of_run(rounds), {"a": 16, "b": 4, "c": 8, "d": 8})
    assert first.startswith("a (rank 16, the largest) was left out")
    assert second.startswith("c kept 40% of its weight")
    one = of_run(rounds[:1])
    assert [x.split()[0] for x in remarks(one, {})] == ["a", "c"], "one round is no habit, but no weight is little"
    assert remarks(one, {"a": 8, "b": 8})[0].startswith("a kept 0%")
    even = [{"defence": line("multi-krum (liars = 1)", a=1 / 3, b=1 / 3, c=1 / 3 * (t == 1), d=1 / 3)} for t in (0, 1)]
    assert remarks(of_run(even), {}) == []
