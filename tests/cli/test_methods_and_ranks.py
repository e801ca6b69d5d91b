"""`fedlora methods` and `fedlora experiment ranks`: lists, tables, pictures. Kinds of evidence: oracle (by hand),
contract."""

from __future__ import annotations

import json
from collections.abc import Callable

from fedlora import METHODS, build
from support.command_line import Said, cells, invoke


def test_methods_are_listed_with_papers_and_can_be_built_from_the_json(wide: None) -> None:
    """Every method of `METHODS`, with its paper; `build` takes its hyper-parameters as defaults."""
    said = " ".join(invoke("methods").stdout.split())
    listed = json.loads(invoke("methods", "--json").stdout)
    assert set(listed) == set(METHODS)
    for name, facts in listed.items():
        assert set(facts) == {"paper", "hyper-parameters"} and facts["paper"] == METHODS[name].paper
        assert build(name, **facts["hyper-parameters"]) == build(name)
        assert f"│ {name} │ {METHODS[name].paper} │" in said
    assert "energy=0.9" in said and listed["svd"]["hyper-parameters"]["energy"] == 0.9


def test_ranks_shows_counts_and_sums(wide: None) -> None:
    """By hand: 10 clients of 2, 4, 8. heavy-tail 8, 1, 1: 16 + 4 + 8 = 28, at a quarter 7. Mirrored 1, 1, 8: 70 and
    17.5. flexlora-uniform 2.5 each, the two left to the smallest: 3 of 8, 3 of 30, 2 of 30/200, 2 of 200: 574, where
    attention counts."""
    args = ("--ranks", "8,2,4", "--clients", 10, "--participation", 0.25)
    said = invoke("experiment", "ranks", "heavy-tail", "heavy-tail-strong", "flexlora-uniform", *args).stdout
    rows = [cells(line) for line in said.splitlines() if line.startswith("│")]
    assert rows == [
        ["heavy-tail", "8 of 2, 1 of 4, 1 of 8", "28", "7"],
        ["heavy-tail-strong", "1 of 2, 1 of 4, 8 of 8", "70", "17.5"],
        ["flexlora-uniform", "3 of 8, 3 of 30, 2 of 30/200, 2 of 200", "574", "143.5"],
    ]
    assert "Rank profiles over 10 clients" in said


def test_what_is_no_profile_or_rank_is_one_line(main: Callable[..., Said]) -> None:
    for args, says in (
        (["pareto"], "'pareto'; known: uniform, normal, heavy-tail"),
        (["--ranks", "4,x"], "separated by commas; got '4,x'"),
        (["--ranks", "4,2.5"], "--ranks takes whole numbers; got 2.5"),
        (["--ranks", "0,4"], "at least 1"),
    ):
        assert says in main("experiment", "ranks", *args).complaint()
