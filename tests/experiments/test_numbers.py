"""The numbers that runs are compared by: their names, what a run needs to have them, how they are told apart and
written. Kinds: oracle (by hand), contract."""

from __future__ import annotations

from typing import Any

import pytest

from fedlora.errors import ConfigError
from fedlora.experiments.digits import alike, difference_in_words, in_words, places, shown
from fedlora.experiments.scores import KNOWN, parse_number
from fedlora.experiments.tables import CellScore, difference, orders, placings
from fedlora.runs.config import RunConfig, parse_config
from support.made_results import bare


def config(**tables: Any) -> RunConfig:
    return parse_config({"model": {"path": "m"}, "data": {"train": "x.csv"}, "clients": {"ranks": [2, 2]}} | tables)


@pytest.mark.parametrize(
    "name",
    [
        "nonsense", "loss", "test", "test,last", "test, lats", "rounds to abc", "rounds to", "rounds to nan",
        "rounds to inf", "rounds to X", "clients, best", "",
    ],
)  # fmt: skip
def test_a_name_that_is_none_is_refused_with_all_that_there_are(name: str) -> None:
    with pytest.raises(ConfigError) as said:
        parse_number(name)
    assert repr(name) in str(said.value) and all(known in str(said.value) for known in KNOWN)


@pytest.mark.parametrize(
    ("name", "tables", "says"),
    [
        ("validation, last", {"data": {"train": "x.csv", "validation": 0}}, "data.validation = 0 leaves none"),
        ("test, best", {"data": {"train": "x.csv", "validation": 0}}, "data.validation = 0 leaves none"),
        ("rounds to 0.9", {"data": {"train": "x.csv", "validation": 0}}, "data.validation = 0 leaves none"),
        ("test, last", {"data": {"train": "x.csv", "test": 0}}, "data.test = 0 leaves none"),
        ("clients, last", {}, "evaluate.clients_at_end = true"),
        ("unseen, last", {}, "data.task = 'superni'"),
        ("validation_mismatched, last", {}, "data.task = 'mnli'"),
    ],
)
def test_what_no_run_of_a_configuration_can_have(name: str, tables: dict[str, Any], says: str) -> None:
    why = parse_number(name).lacks(config(**tables))
    assert why is not None and says in why


def test_what_a_run_has() -> None:
    for name in ("test, best", "test, last", "rounds to 0.9"):
        assert parse_number(name).lacks(config(run={"rounds": 3})) is None


@pytest.mark.quick(20)
@pytest.mark.parametrize("name", [*(known for known in KNOWN if known[-1] != "X"), "rounds to 0.9"])
@pytest.mark.parametrize("history", [[], [0.5], [None], [0.5, None], [0.5, 0.6, None]])
def test_a_score_is_a_number_or_none_and_never_an_error(name: str, history: list[float | None]) -> None:
    """Of runs without validation, of one evaluation, diverged ones."""
    lines = [{"round": k, "metrics": {"accuracy": x}} for k, x in enumerate(history, start=1)]
    told = {"test": {"last": {"accuracy": None}, "best": {}}, "clients_at_end": {"a": {"accuracy": None}}}
    found = bare("x", lines, **told).score(name)
    assert found is None or found == found, "no NaN"
    assert found is None or [x for x in history if x is not None]


# ---- round-off -------------------------------------------------------------------------------------------------------


def test_scores_that_differ_by_rounding_share_a_place() -> None:
    """By hand: 1e-8 of 0.7 is rounding, 1e-4 is not; a chain of three that are alike in pairs is one place."""
    assert alike(0.7, 0.7 + 1e-8) and not alike(0.7, 0.7001) and alike(0.0, 0.0)
    assert places([0.7, 0.8, 0.7 + 1e-8]) == (1, 0, 1)
    assert places([0.7, 0.8, 0.7 + 1e-8], smaller_is_better=True) == (0, 2, 0)
    assert places([1.0, 1.0 + 7e-7, 1.0 + 14e-7, 0.5]) == (0, 0, 0, 3)
    cells = [
        CellScore({"m": "a"}, {0: 1.1, 1: 1.2, 2: 1.3}, 3, None),
        CellScore({"m": "b"}, {0: 1.1 + 1e-8, 1: 1.2 - 1e-8, 2: 1.3}, 3, None),
    ]
    assert [p.counts for p in placings(cells, "m")] == [(3, 0), (3, 0)] and orders(cells) == (1, 3)


def test_a_difference_of_rounding_is_none() -> None:
    """Equal; a common gap with rounding on it has no spread; a small but real one keeps its interval."""
    equal = difference("a", "b", {}, [(1.1 + 1e-8, 1.1), (1.2 - 2e-8, 1.2), (1.3, 1.3)])
    assert (equal.mean, equal.low, equal.high, equal.verdict, equal.decided) == (0.0, 0.0, 0.0, "equal", False)
    assert difference("a", "b", {}, [(1.6 + 1e-8, 1.1), (1.7, 1.2)]).verdict == "no spread"
    assert difference("a", "b", {}, [(1.10001, 1.1), (1.20003, 1.2)]).verdict == "undecided"


def test_enough_digits_are_shown() -> None:
    """By hand: two significant digits of the spread, four behind the point at least; rounding gets none."""
    assert in_words(0.81234, 0.021) == "0.8123 ± 0.0210"
    assert in_words(0.8123456, 0.000012) == "0.812346 ± 0.000012"
    assert in_words(0.8123456, 1e-9) == "0.8123 ± 0.0000"
    assert in_words(0.000012) == "0.000012" and in_words(0.0) == "0.0000" and in_words(12.5) == "12.5000"
    assert difference_in_words(-0.00001, -0.00003, 0.00001) == ("-0.000010", "-0.000030 .. +0.000010")
    assert difference_in_words(0.02, -0.01, 0.05, " to ") == ("+0.0200", "-0.0100 to +0.0500")
    assert [shown(v) for v in (0.003, 1e-5, 4.0, 0.0010000001)] == ["0.003", "1e-05", "4", "0.0010000001"]
