"""`fedlora methods` and `fedlora experiment ranks`: lists, tables, pictures. Kinds of evidence: oracle (by hand),
contract."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fedlora import METHODS, build
from support.command_line import Said, cells, invoke
from support.known_warnings import FUTURE_NAMES, NOT_ON_THE_HUB

pytestmark = [FUTURE_NAMES, NOT_ON_THE_HUB]


def test_methods_lists_every_method_with_its_paper_and_hyper_parameters(wide: None) -> None:
    said = " ".join(invoke("methods").stdout.split())
    for name, cls in METHODS.items():
        assert f"│ {name} │ {cls.paper} │" in said
    assert "rho=1.0" in said and "gamma=0.5" in said and "energy=0.9" in said


def test_methods_as_json_can_be_built_from() -> None:
    """Every method of `METHODS`, with its paper; `build` takes its hyper-parameters as defaults."""
    listed = json.loads(invoke("methods", "--json").stdout)
    assert set(listed) == set(METHODS)
    for name, facts in listed.items():
        assert set(facts) == {"paper", "hyper-parameters"} and facts["paper"] == METHODS[name].paper
        assert build(name, **facts["hyper-parameters"]) == build(name)
    assert listed["svd"]["hyper-parameters"]["energy"] == 0.9


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


# Of 50 clients; the first four are our reading of the GLoRA paper (note 18), the others FlexLoRA's code.
PROFILES = {
    "uniform": {"4": 10, "8": 10, "16": 10, "32": 10, "64": 10},
    "normal": {"4": 3, "8": 12, "16": 20, "32": 12, "64": 3},
    "heavy-tail": {"4": 40, "8": 3, "16": 3, "32": 2, "64": 2},
    "heavy-tail-strong": {"4": 2, "8": 2, "16": 3, "32": 3, "64": 40},
    "flexlora-uniform": {"8": 13, "30": 13, "30/200": 12, "200": 12},
    "flexlora-normal": {"8": 3, "30": 3, "30/200": 22, "200": 22},
    "flexlora-heavy-tail": {"8": 40, "30": 3, "30/200": 2, "200": 5},
    "flexlora-heavy-tail-strong": {"8": 3, "30": 2, "30/200": 5, "200": 40},
}


def test_ranks_without_arguments_shows_all_profiles() -> None:
    assert json.loads(invoke("experiment", "ranks", "--json").stdout) == PROFILES


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["pareto"], "'pareto'; known: uniform, normal, heavy-tail"),
        (["--ranks", "4,x"], "separated by commas; got '4,x'"),
        (["--ranks", "4,2.5"], "--ranks takes whole numbers; got 2.5"),
        (["--ranks", "0,4"], "at least 1"),
    ],
)
def test_what_is_no_profile_or_rank_is_one_line(
    tmp_path: Path, main: Callable[..., Said], monkeypatch: pytest.MonkeyPatch, args: list[str], says: str
) -> None:
    """Exit code 2, nothing on stdout, nothing written."""
    monkeypatch.chdir(tmp_path)
    said = main("experiment", "ranks", *args)
    assert says in said.complaint() and not list(tmp_path.iterdir())
    assert said.out == ""
