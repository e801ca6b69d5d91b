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
    "uniform": "10 of 4, 10 of 8, 10 of 16, 10 of 32, 10 of 64",
    "normal": "3 of 4, 12 of 8, 20 of 16, 12 of 32, 3 of 64",
    "heavy-tail": "40 of 4, 3 of 8, 3 of 16, 2 of 32, 2 of 64",
    "heavy-tail-strong": "2 of 4, 2 of 8, 3 of 16, 3 of 32, 40 of 64",
    "flexlora-uniform": "13 of 8, 13 of 30, 12 of 30/200, 12 of 200",
    "flexlora-normal": "3 of 8, 3 of 30, 22 of 30/200, 22 of 200",
    "flexlora-heavy-tail": "40 of 8, 3 of 30, 2 of 30/200, 5 of 200",
    "flexlora-heavy-tail-strong": "3 of 8, 2 of 30, 5 of 30/200, 40 of 200",
}


def test_ranks_without_arguments_shows_all_profiles() -> None:
    found = json.loads(invoke("experiment", "ranks", "--json").stdout)
    assert {
        name: ", ".join(f"{n} of {rank}" for rank, n in counts.items()) for name, counts in found.items()
    } == PROFILES


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
