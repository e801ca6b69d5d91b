"""Stored results, plans and failures that somebody changed: one line that says what is wrong, and no number of them.

Kinds: hostile, oracle. What a file has to be follows from its configuration and from its other values.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fedlora.experiments.stored import failures
from fedlora.experiments.stored.stored_json import read_table

from fedlora.errors import CheckpointError
from fedlora.experiments.result import read_results, write_result
from support.command_line import Said
from support.small_world import make, planned, small_world, where

ROOT = Path(__file__).parents[2]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return small_world(tmp_path / "place")


def changed(path: Path, keys: str, value: object) -> None:
    """The file with another value; `...` takes the key away."""
    raw: Any = json.loads(path.read_text())
    *way, last = keys.split("/")
    table = raw
    for key in way:
        table = table[int(key)] if isinstance(table, list) else table[key]
    if value is ...:
        del table[last]
    else:
        table[last] = value
    path.write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("keys", "value", "says"),
    [
        ("test/last/loss", True, "test.last.loss is True"),
        ("test/last/loss", "0.5", "test.last.loss is '0.5'"),
        ("test/last/loss", [0.5], "test.last.loss is [0.5]"),
        ("test/last/loss", 1e308, "between 0 and 3.5e+38"),
        ("test/last/loss", -0.1, "loss = -0.1"),
        ("test/last/accuracy", 1.5, "accuracy = 1.5"),
        ("test/last/loss", 10**400, "a whole number of 401 digits"),
        ("config/run/seed", 12, "digest is"),
        ("config/run", ..., "digest is"),
        ("config", {}, "no configuration of"),
        ("commit", ..., "commit is missing"),
        ("commit/clean", 1, "commit.clean is 1"),
        ("commit/clean", "yes", "commit.clean is 'yes'"),
        ("commit/id", "main", "commit.id is 'main'"),
        ("machine", ..., "machine is missing"),
        ("machine/device", "cpu\n<!-- end -->", "no word or two"),
        ("metric", ..., "metric is missing"),
        ("metric", "accuracy", "metric is 'accuracy'"),
        ("method", "svd", "method is 'svd'"),
        ("history/1/round", 3, "history is [1, 3]"),
        ("history", [1], "history.0 is 1"),
        ("validation/last/loss", 0.01, "validation.last.loss is 0.01"),
        ("history/0/metrics", {"accuracy": 0.5}, "round 1 has scores"),
        ("mergers", [], "mergers is []"),
        ("mergers", {"a": {"test": {}}}, "mergers.a.merger is missing"),
        ("mergers", {"a": {"merger": {}, "test": {}, "strength": "a"}}, "mergers.a.strength is 'a'"),
        ("mergers", {"a": {"merger": {}, "test": {}, "strengths_tried": [1.0]}}, "mergers.a.strengths_tried is [1.0]"),
        ("versions", ["torch"], "versions is ['torch']"),
        ("versions", None, "versions is None"),
        ("privacy", {"epsilon_planned": 1.0}, "privacy.delta is missing"),
        ("parts", [], "parts: the first one starts"),
        ("parts", [{"after": 0, "commit": None, "machine": None}], "(parts) is of a changed checkout"),
    ],
)  # fmt: skip
def test_a_changed_result_is_named_with_its_key_and_value(place: Path, keys: str, value: object, says: str) -> None:
    path = next((place / "results").glob("*.json"))
    changed(path, keys, value)
    with pytest.raises(CheckpointError) as refused:
        read_results(path.parent)
    said = str(refused.value)
    assert says in said and str(path) in said and "Restore the file" in said and len(said) < 1000


def test_test_scores_agree_with_what_else_tells_of_them(place: Path) -> None:
    """The best round is the last one: one state, one score. Three of four right is an accuracy of 0.75."""
    path = next((place / "results").glob("*.json"))
    changed(path, "best_round", 2)
    read_results(path.parent)
    changed(path, "test/best/loss", 0.123)
    with pytest.raises(CheckpointError, match=r"test.best is .*test.last, .*same round"):
        read_results(path.parent)
    changed(path, "best_round", 1)
    read_results(path.parent)
    changed(path, "confusion", {"classes": ["a", "b"], "last": [[2, 1], [0, 1]]})
    with pytest.raises(CheckpointError, match=r"confusion.last counts 0.75"):
        read_results(path.parent)
    changed(path, "test/last/accuracy", 0.75)
    read_results(path.parent)


NO_JSON = {
    "not UTF-8": (b'{"digest": "\xff"}', "it is not UTF-8"),
    "nested": (b"[" * 100_000, "nested too deeply"),
    "a list": (b"[1]", "no table of keys"),
    "NaN": (b'{"a": NaN}', "NaN is no number in JSON"),
    "infinite": (b'{"a": 1e999}', "is more than a number can be"),
    "digits": (b'{"a": ' + b"9" * 5000 + b"}", "a whole number of 5000 digits"),
    "twice": (b'{"a": 1, "a": 2}', "the key 'a' stands in it twice"),
    "surrogate": (b'{"a": "\\ud800"}', "half a character"),
    "empty": (b"", "Expecting value"),
}
COMMANDS = {
    "table": ("table", "small", "work"),
    "status": ("status", "small", "work"),
    "run": ("run", "small", "--plan", "work"),
    "plot": ("plot", "small", "work", "claims"),
    "plan": ("plan", "small", "--again", "work", "claims"),
    "decide": ("decide", "small", "work", "claims"),
    "fill": ("fill", "PAGE", "work", "claims"),
    "report": ("report", "--out", "OUT", "work", "claims"),
}


def call(main: Callable[..., Said], place: Path, name: str) -> Said:
    words = COMMANDS[name]
    told = {"PAGE": str(place / "page.md"), "OUT": str(place / "r.html")}
    args = [told.get(word, word) for word in words if word not in ("work", "claims")]
    return main("experiment", *args, *where(place, *words))


@pytest.mark.quick(18)
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("what", NO_JSON)
def test_files_that_are_none_are_one_line_in_every_command(
    place: Path, main: Callable[..., Said], name: str, what: str
) -> None:
    """A result first; then, where the command reads plans, a plan."""
    content, says = NO_JSON[what]
    if name == "decide":
        planned(place)
    odd = place / "results" / "0000000000000000.json"
    odd.write_bytes(content)
    assert says in call(main, place, name).error()
    odd.unlink()
    if name in ("status", "run"):
        return
    (place / "results" / "plans").mkdir(exist_ok=True)
    (place / "results" / "plans" / "small.json").write_bytes(content)
    said = call(main, place, name).error()
    assert says in said and "Restore it" in said


def test_links_in_a_circle_folders_and_pipes_are_one_line(place: Path, main: Callable[..., Said]) -> None:
    import os

    odd = place / "results" / "x.json"
    odd.symlink_to(odd)
    assert "x.json cannot be used" in call(main, place, "table").error()
    odd.unlink()
    odd.mkdir()
    assert "it is no file" in call(main, place, "table").error()
    odd.rmdir()
    os.mkfifo(odd)
    assert "it is no file" in call(main, place, "table").error()
    odd.unlink()
    plan = place / "results" / "plans" / "small.json"
    plan.parent.mkdir()
    plan.symlink_to(plan)
    for name in ("table", "decide", "plan", "fill", "report", "plot"):
        assert "small.json cannot be used" in call(main, place, name).error(), name


@pytest.mark.parametrize(
    ("keys", "value", "says"),
    [
        ("seeds", [0, 1], "looks.0 saw [4] of 4 seeds"),
        ("spreads/which/new against old, here", 0.5, "new against old, here = 0.5"),
        ("spreads/which", {}, "spreads, which"),
        ("needed/which", 40, "needed.which = 40"),
        ("needed", {}, "needed.which = None"),
        ("rates", [1], "rates.0 is 1"),
        ("looks", [{"at": "now", "there": [4], "of": 4}], "looks.0.at is 'now'"),
        ("looks", [{"at": "2026-11-23T00:00:00+00:00", "there": 4, "of": 4}], "looks.0.there is 4"),
        ("looks", [{"at": "2026-11-23T00:00:00+00:00", "there": [1], "of": 1}], "looks.0 saw [1] of 1 seeds, and 4"),
        ("written", 5, "written is 5"),
        ("profile", "pilot", "says profile = 'pilot'"),
        ("before", [{}], "before.0: "),
        ("before", 3, "before is 3"),
        ("experiment", "other", "plan of 'other'"),
        ("results", {"there": "none", "of": 8}, "results.there is 'none'"),
        ("commit", "clean", "commit is 'clean'"),
    ],
)  # fmt: skip
def test_a_changed_plan_is_refused_where_verdicts_or_its_numbers_are_shown(
    place: Path, main: Callable[..., Said], keys: str, value: object, says: str
) -> None:
    """What a plan says is recomputed from the pilot; and it has a plan's shape. Without the digest of its runs, which
    older plans have not, and which would tell some of it, too."""
    path = planned(place)
    changed(path, "runs", ...)
    make(place, "mini")
    assert call(main, place, "decide").code == 0
    changed(path, keys, value)
    for name in ("decide", "fill", "report"):
        assert says in call(main, place, name).error(), name


def test_a_plan_is_not_believed_when_its_pilot_is_another_one(place: Path, main: Callable[..., Said]) -> None:
    planned(place)
    for path in (place / "results").glob("*.json"):
        raw = json.loads(path.read_text())
        if raw["config"]["run"]["seed"] == 11 and raw["method"] == "glora":
            changed(path, "test/last/loss", 0.7)
    assert "its pilot, its search" in call(main, place, "fill").error()


def test_a_plan_without_its_pilot_is_said_to_be_unchecked(place: Path, main: Callable[..., Said]) -> None:
    planned(place)
    for path in (place / "results").glob("*.json"):
        path.unlink()
    make(place, "mini")
    assert "not checked: its pilot" in call(main, place, "decide").out.replace("\n", " ")
    assert "not checked: its pilot" in call(main, place, "fill").error(), "it shows the plan's own numbers"


def test_a_result_that_would_be_refused_is_not_written(tmp_path: Path, place: Path) -> None:
    raw = dict(next(iter(read_results(place / "results").values())).raw)
    with pytest.raises(CheckpointError, match="rounds is 7"):
        write_result(tmp_path / "new", {**raw, "rounds": 7})
    assert not (tmp_path / "new").exists()
    path = write_result(tmp_path / "new", {**raw, "wall_seconds": 1 / 3})
    assert read_table(path)["wall_seconds"] == 0.333333


def test_numbers_that_a_run_is_known_by_are_not_rounded(tmp_path: Path, place: Path) -> None:
    """Nine digits of a learning rate are in the digest, and stay in the file."""
    experiment = place / "experiments" / "small.toml"
    experiment.write_text(experiment.read_text().replace("[run.run]", "[run.train]\nlr = 0.00123456789\n[run.run]"))
    (digest, *_) = make(place, "mini")
    assert read_results(place / "results")[digest].raw["config"]["train"]["lr"] == 0.00123456789


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"error": 1}', b"\xff", b'{"error": "x", "by_machine": 1}'])
def test_a_damaged_report_of_a_failure_is_not_taken_for_a_failure(
    place: Path, main: Callable[..., Said], content: bytes
) -> None:
    """It was one before, and dropped a value of a search."""
    path = place / "work" / "failures" / "0000000000000000.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert "fedlora experiment retry" in call(main, place, "table").error()
    kept = failures.path_of(place / "results") / path.name
    kept.parent.mkdir()
    path.rename(kept)
    assert "or delete it" in call(main, place, "table").error()


def test_all_stored_results_and_plans_of_this_repository_are_read() -> None:
    from fedlora.experiments.seed_plan import read_plan

    assert len(read_results(ROOT / "results")) >= 667
    for path in (ROOT / "results" / "plans").glob("*.json"):
        assert read_plan(path)["experiment"] == path.stem
