"""Runs of code that no commit describes: no table shows them, and every command says how many, why, and what to do.
Kind: end-to-end."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fedlora.experiments.result import Commit
from fedlora.experiments.spec import load_experiment
from fedlora.experiments.store import as_lines, read_results_of
from support.command_line import Said, invoke
from support.cut_claims import cut_claims
from support.known_warnings import FUTURE_NAMES
from support.made_results import by_effects, write_runs

pytestmark = [FUTURE_NAMES]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The pilot of map_rounds, 16 runs: five by a changed checkout, the others installed without git."""
    (tmp_path / "experiments").mkdir()
    for name in ("map_once", "map_rounds"):
        shutil.copy(ROOT / "experiments" / f"{name}.toml", tmp_path / "experiments")
    cut_claims(tmp_path, ("map_once", "map_rounds"))
    aside = tmp_path / "work" / "unclean"
    made = write_runs(
        aside, load_experiment(tmp_path / "experiments" / "map_rounds.toml"), "pilot", by_effects({}, 0.01)
    )
    assert made == 16
    (path,) = aside.glob("*.jsonl")
    of = [Commit(id="c" * 40, clean=False)] * 5 + [None] * 11
    found = zip(read_results_of(path).items(), of, strict=True)
    path.write_text(as_lines({digest: one.model_copy(update={"commit": commit}) for (digest, one), commit in found}))
    (tmp_path / "page.md").write_text("<!-- filled: map_rounds pilot scores -->\n<!-- end -->\n")
    return tmp_path


COMMANDS = [
    ("status", "map_rounds", "--profile", "pilot"), ("table", "map_rounds", "--profile", "pilot"),
    ("run", "map_rounds", "--profile", "pilot"), ("plan", "map_rounds"), ("plot", "map_rounds", "--profile", "pilot"),
    ("report", "--out", "PLACE/r.html"), ("fill", "PLACE/page.md"),
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_every_command_says_what_it_leaves_out(
    place: Path, command: tuple[str, ...], main: Callable[..., Said]
) -> None:
    told = [word.replace("PLACE", str(place)) for word in command]
    where = ["--experiments", place / "experiments", "--results", place / "results", "--work", place / "work"]
    claims = ["--claims", place / "claims.toml"] if command[0] in ("plan", "plot", "report", "fill") else []
    said = " ".join(main("experiment", *told, *map(str, where), *map(str, claims)).err.split())
    assert "map_rounds, profile pilot: 16 finished runs " in said and "no commit" in said
    assert re.search("5 of code .*changed.* commit", said) and re.search("11 of code .*installed without git", said)
    assert "git clone" in said and "--work NEW" in said and str(place / "work" / "unclean") in said


def test_decide_says_it_of_the_profile_that_answers(place: Path, main: Callable[..., Said]) -> None:
    rounds = load_experiment(place / "experiments" / "map_rounds.toml")
    for name in ("map_once", "map_rounds"):
        write_runs(
            place / "results",
            load_experiment(place / "experiments" / f"{name}.toml"),
            "pilot",
            by_effects({}, 0.01),
        )
    where = ["--experiments", place / "experiments", "--results", place / "results", "--work", place / "work"]
    where += ["--claims", place / "claims.toml"]
    invoke("experiment", "plan", "map_rounds", *where)
    count = write_runs(place / "work" / "unclean", rounds, "mini", by_effects({}, 0.01))
    said = " ".join(main("experiment", "decide", "map_rounds", *map(str, where)).err.split())
    assert f"map_rounds, profile mini: {count} finished runs " in said


def test_a_run_that_counts_is_not_left_out(place: Path) -> None:
    """The same digest among the clean results: nothing is missed, and nothing is said."""
    rounds = load_experiment(place / "experiments" / "map_rounds.toml")
    write_runs(place / "results", rounds, "pilot", by_effects({}, 0.01))
    where = ["--experiments", place / "experiments", "--results", place / "results", "--work", place / "work"]
    said = invoke("experiment", "table", "map_rounds", "--profile", "pilot", *where)
    assert said.exit_code == 0 and "left out" not in said.stderr
