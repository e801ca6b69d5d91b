"""Runs of code that no commit describes: no table shows them, and every command says how many, why, and what to do.
Kind: end-to-end."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fedlora.experiments.result import Commit
from fedlora.experiments.store import as_lines, read_results_of
from support.command_line import Said, invoke
from support.known_warnings import FUTURE_NAMES
from support.small_world import small_world, where

pytestmark = [FUTURE_NAMES]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Eight runs: three by a changed checkout, the others installed without git."""
    place = small_world(tmp_path / "place")
    (path,) = (place / "results").glob("*.jsonl")
    of = [Commit(id="c" * 40, clean=False)] * 3 + [None] * 5
    found = zip(read_results_of(path).items(), of, strict=True)
    (place / "work" / "unclean").mkdir(parents=True)
    aside = place / "work" / "unclean" / path.name
    aside.write_text(as_lines({digest: one.model_copy(update={"commit": commit}) for (digest, one), commit in found}))
    path.unlink()
    return place


@pytest.mark.parametrize("command", ["status", "table", "run", "plot"])
def test_every_command_says_what_it_leaves_out(place: Path, command: str, main: Callable[..., Said]) -> None:
    said = " ".join(main("experiment", command, "small", *where(place)).err.split())
    assert "small, profile mini: 8 finished runs " in said and "no commit" in said
    assert re.search("3 of code .*changed.* commit", said) and re.search("5 of code .*installed without git", said)
    assert "git clone" in said and "--work NEW" in said and str(place / "work" / "unclean") in said


def test_a_run_that_counts_is_not_left_out(place: Path) -> None:
    """The same digest among the clean results: nothing is missed, and nothing is said."""
    shutil.copy(place / "work" / "unclean" / "made.jsonl", place / "results")
    said = invoke("experiment", "table", "small", *where(place))
    assert said.exit_code == 0 and "left out" not in said.stderr
