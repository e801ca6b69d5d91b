"""What shows a number of a run that an open plan waits for refuses, waits, or says so. Kinds: hostile, whole.

By hand: the plan of the small experiment has four seeds, and two are there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fedlora.experiments.grid import Grid
from fedlora.experiments.seed_plan import read_plan
from fedlora.experiments.spec import load_experiment
from fedlora.experiments.store import note_failed
from support.command_line import Said, invoke
from support.small_world import CLAIMS, make, planned, small_world, where

BLOCK = "<!-- filled: {} scores -->\n<!-- end -->\n"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return small_world(tmp_path / "place")


@pytest.fixture
def half(place: Path) -> Path:
    """The plan, then two of its four seeds, and half of a third."""
    planned(place)
    make(place, "mini", lambda label, seed: seed < 2 or (seed == 2 and label == "new"))
    return place


def test_a_table_before_its_time_says_so(half: Path) -> None:
    said = invoke("experiment", "table", "small", *where(half, "work"), code=1)
    assert re.search("2 of 4 .*small", " ".join(said.stderr.split()))


@pytest.mark.parametrize("claims", [True, False])
def test_nothing_is_drawn_filled_or_reported_before_its_time(
    half: Path, claims: bool, main: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With or without claims: the plan says which seeds are meant."""
    monkeypatch.chdir(half)  # where no docs/claims.toml is
    options = where(half, "work", "claims") if claims else where(half, "work")
    assert "2 of 4 planned seeds" in main("experiment", "plot", "small", *options).error()
    assert not list(half.rglob("*.png"))
    (half / "page.md").write_text(BLOCK.format("small mini"))
    invoke("experiment", "fill", half / "page.md", *options)
    page = (half / "page.md").read_text()
    assert re.search("No number .*: 2 of 4", page) and not re.search(r"0\.\d", page)
    said = main("experiment", "report", "--out", half / "r.html", *options)
    assert "not shown: 2 of 4 planned seeds" in said.err
    assert not re.search(r"experiment table \w+ --profile mini", (half / "r.html").read_text())


def test_with_all_seeds_there_everything_is_shown(half: Path) -> None:
    make(half, "mini")
    said = invoke("experiment", "table", "small", *where(half, "work"))
    assert "planned seeds" not in said.stdout + said.stderr
    (half / "page.md").write_text(BLOCK.format("small mini"))
    invoke("experiment", "fill", half / "page.md", *where(half, "work", "claims"))
    assert "0.6150 ± 0.0129" in (half / "page.md").read_text(), "by hand: the mean of 0.60, 0.61, 0.62, 0.63"


def test_runs_of_other_seeds_are_nobody_s_look(half: Path) -> None:
    """The pilot is shown: no plan waits for it."""
    said = invoke("experiment", "table", "small", "--profile", "pilot", *where(half, "work"))
    assert "planned seeds" not in said.stdout + said.stderr


def test_a_plan_after_its_runs_says_so_in_every_verdict(place: Path) -> None:
    """By hand: six of the eight planned runs (two methods, four seeds) were there."""
    make(place, "mini", lambda label, seed: seed < 3)
    said = invoke("experiment", "plan", "small", *where(place, "work", "claims"))
    assert "6 of the 8 planned runs " in " ".join((said.stdout + said.stderr).split())
    make(place, "mini")
    words = "6 of the 8 planned runs "
    assert words in " ".join(invoke("experiment", "decide", "small", *where(place, "work", "claims")).output.split())
    (place / "page.md").write_text("<!-- filled: small mini decisions which -->\n<!-- end -->\n")
    invoke("experiment", "fill", place / "page.md", *where(place, "work", "claims"))
    assert words in (place / "page.md").read_text()
    invoke("experiment", "report", "--out", place / "r.html", *where(place, "work", "claims"))
    assert words in (place / "r.html").read_text()


def test_what_failed_stands_below_the_table(place: Path) -> None:
    """A run that failed by itself, in a clean checkout, is kept beside the results."""
    (place / "claims.toml").write_text(CLAIMS)
    make(place, "same", lambda label, seed: seed > 1)
    experiment = load_experiment(place / "experiments" / "small.toml")
    first = next(run for run in Grid(experiment, "same").runs if run.seed == 0 and run.cell["method"] == "new")
    told = {"label": first.label, "error": "UploadRefused", "commit": {"id": "a" * 40, "clean": True}}
    note_failed(place / "results", first.digest, told)
    (place / "page.md").write_text(BLOCK.format("small same"))
    invoke("experiment", "fill", place / "page.md", *where(place, "work", "claims"))
    assert (
        "4 of 8 runs, commit ccccccc, cpu, x86_64. 1 failed: here, new, seed 0 (UploadRefused)."
        in (place / "page.md").read_text()
    )


def test_a_page_shows_the_planned_seeds_and_no_further_ones(place: Path) -> None:
    """Four seeds are planned and the profile has six, all of them run: the table is of four, as the line below says.
    By hand: 0.60, 0.61, 0.62, 0.63 have the mean 0.6150; with 0.64 and 0.65 it would be 0.6250."""
    planned(place)
    path = place / "experiments" / "small.toml"
    text = path.read_text()
    path.write_text(re.sub(r"(\[profiles\.mini\]\nseeds = )\[.*?\]", r"\g<1>[0, 1, 2, 3, 4, 5]", text))
    assert path.read_text() != text
    cap = (place / "claims.toml").read_text()
    (place / "claims.toml").write_text(re.sub(r"cap = \d+", "cap = 4", cap))
    invoke("experiment", "plan", "small", "--again", *where(place, "work", "claims"))
    assert len(read_plan(place / "results" / "plans" / "small.json").seeds) == 4
    make(place, "mini")
    (place / "page.md").write_text(BLOCK.format("small mini"))
    invoke("experiment", "fill", place / "page.md", *where(place, "work", "claims"))
    page = (place / "page.md").read_text()
    assert "of the 4 seeds planned" in page and "0.6150 ± 0.0129" in page and "| 6 |" not in page
