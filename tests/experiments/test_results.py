"""Lines of results, what the search chooses from them, and frames. Kinds: by hand, end-to-end."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import fedlora
from fedlora.errors import CheckpointError, ConfigError
from fedlora.experiments import results
from fedlora.experiments.grid import Grid, Planned
from fedlora.experiments.scores import parse_number
from fedlora.experiments.spec import Experiment
from fedlora.experiments.tune import Choice, Progress, choose
from support.made_results import line, progress_of


def searched(**more: Any) -> Experiment:
    run = {"model": {"name": "demo"}, "data": {"train": "demo"}}
    axes = {
        "method": {"FedIT": {"method.name": "fedit"}, "GLoRA": {"method.name": "glora"}},
        "split": {"a": {"clients.dirichlet_alpha": 0.1}, "b": {"clients.dirichlet_alpha": 0.5}},
    }
    tune = {"values": [1e-2, 1e-1, 1e-3], "seeds": [7]}
    return Experiment.model_validate(
        {"name": "made", "title": "M", "run": run, "axes": axes, "tune": tune, "profiles": {"mini": {"seeds": [0, 1]}},
         **more}
    )  # fmt: skip


# ---- files -------------------------------------------------------------------------------------------------------


def test_lines_are_appended_and_sorted_and_half_a_line_does_not_count(tmp_path: Path) -> None:
    """What a killed driver half wrote is written over by the next one."""
    path = tmp_path / "results" / "made.jsonl"
    for digest in ("b", "a"):
        results.append(path, {"digest": digest, "x": 1})
    with path.open("a") as file:
        file.write('{"digest": "c", "x')
    assert list(results.read(path)) == ["b", "a"]
    results.append(path, {"digest": "d"})
    assert list(results.read(path)) == ["b", "a", "d"]
    results.rewrite(path, results.read(path).values())
    assert [json.loads(text)["digest"] for text in path.read_text().splitlines()] == ["a", "b", "d"]
    for store in (lambda line: results.append(path, line), lambda line: results.rewrite(path, [line])):
        with pytest.raises(ValueError, match="JSON compliant"):
            store({"digest": "e", "x": math.nan})
    path.write_text('{"digest": "a"}\nnothing\n{"digest": "b"}\n')
    with pytest.raises(CheckpointError, match=r"made.jsonl, line 2, is no result"):
        results.read(path)


def test_a_history_is_kept_by_columns_without_details() -> None:
    rounds = [
        {"round": 1, "metrics": {}, "losses": {"a": 1.0}},
        {"round": 2, "metrics": {"loss": 0.5, "client/a": 0.1}, "losses": {"a": None, "b": 2.0}},
    ]  # fmt: skip
    assert results.history(rounds) == {
        "evaluated": [2], "scores": {"loss": [0.5]}, "losses": {"a": [1.0, None], "b": [None, 2.0]}
    }  # fmt: skip


# ---- numbers -----------------------------------------------------------------------------------------------------


def test_numbers_of_a_line_by_their_names() -> None:
    run = Grid(searched(), "mini").searches[0]
    curve = [{"accuracy": x} for x in (0.4, None, 0.8)]
    made = line(
        run, {"accuracy": 0.7}, curve, clients_at_end={"a": {"accuracy": 0.2}, "b": {"accuracy": 0.6}},
        probes={"last": {"unseen": {"accuracy": 0.25}}, "best": {}},
    )  # fmt: skip
    expected = {"test, last": 0.7, "clients, last": 0.4, "unseen, last": 0.25, "rounds to 0.4": 1, "rounds to 0.5": 3}
    assert {name: parse_number(name).of(made) for name in expected} == pytest.approx(expected)
    for name in ("rounds to 0.9", "unseen, best", "validation_mismatched, last"):
        assert math.isnan(parse_number(name).of(made)), name
    assert math.isnan(parse_number("test, last").of(results.failed(run, "diverged")))
    less = line(run, {"loss": 0.7}, [{"loss": x} for x in (0.9, 0.5)], metric="loss")
    assert parse_number("rounds to 0.6").of(less) == 2, "of a loss the target is reached from above"
    with pytest.raises(ConfigError, match="there are: test, best; test, last"):
        parse_number("test last")


# ---- the search --------------------------------------------------------------------------------------------------


def by_value(scores: Mapping[tuple[str, float], float | None], **more: Any) -> dict[tuple[str, ...], Choice]:
    """What is chosen when the search's runs have these scores, by method and value."""
    grid = Grid(searched(), "mini")
    each = ((run, scores[run.cell["method"], run.value or 0]) for run in grid.searches)
    lines = {run.digest: line(run, {more.get("metric", "accuracy"): x}, **more) for run, x in each}
    return choose(grid, lines)


def test_the_search_takes_the_best_mean_on_validation_and_the_smallest_of_equals() -> None:
    """By hand: FedIT is best at the largest value, GLoRA level at two; of losses it is the other way round."""
    scores = {("FedIT", 1e-3): 0.5, ("FedIT", 1e-2): 0.6, ("FedIT", 1e-1): 0.7,
              ("GLoRA", 1e-3): 0.6, ("GLoRA", 1e-2): 0.6, ("GLoRA", 1e-1): 0.1}  # fmt: skip
    assert by_value(scores) == {("FedIT",): Choice(1e-1, [1e-1], "largest"), ("GLoRA",): Choice(1e-3, [1e-3, 1e-2])}
    by_loss = by_value(scores, metric="loss")
    assert by_loss == {("FedIT",): Choice(1e-3, [1e-3], "smallest"), ("GLoRA",): Choice(1e-1, [1e-1], "largest")}


def test_what_has_no_score_is_the_worst_and_nothing_is_chosen_too_early() -> None:
    """Diverged to no number, or refused by the server: never chosen. All of a method: nothing, and it is said."""
    scores = {("FedIT", 1e-3): 0.5, ("FedIT", 1e-2): 0.4, ("FedIT", 1e-1): None,
              ("GLoRA", 1e-3): None, ("GLoRA", 1e-2): None, ("GLoRA", 1e-1): None}  # fmt: skip
    found = by_value(scores)
    assert found[("FedIT",)].value == 1e-3 and found[("GLoRA",)].value is None

    def made(run: Planned) -> dict[str, Any]:
        score = scores[run.cell["method"], run.value or 0]
        return results.failed(run, "no upload left") if score is None else line(run, {"accuracy": score})

    progress = progress_of(searched(), made)
    assert {run.cell["method"] for run, _ in progress.used} == {"FedIT"} and not progress.whole
    assert any("GLoRA" in note and "diverged" in note for note in progress.notes())
    assert "Incomplete: 4 of 8" in progress.notes()[-1]
    one = progress.grid.searches[0].digest
    early = Progress(progress.grid, {digest: x for digest, x in progress.lines.items() if digest != one})
    searched_only = Progress(progress.grid, {run.digest: made(run) for run in progress.grid.searches})
    assert [run.seed for run in searched_only.missing("run")] == [0, 0, 1, 1], "seed by seed"
    assert {*early.choices} == {("GLoRA",)} and [run.digest for run in early.missing("search")] == [one]


# ---- frames ------------------------------------------------------------------------------------------------------


def test_the_frame_has_a_row_for_each_run_and_what_differs(tmp_path: Path) -> None:
    """And by round a row for each score and each client's loss. Runs that failed have none."""
    curve = [{"accuracy": 0.4}, {"accuracy": None}]
    progress = progress_of(searched(), lambda run: line(run, {"accuracy": 0.5}, curve))
    failed = results.failed(progress.grid.planned(progress.grid.cells[0], 99, 1.0, "run"), "x")
    for one in (*progress.lines.values(), failed):
        results.append(tmp_path / "made.jsonl", one)
    runs = fedlora.results(tmp_path)
    assert len(runs) == 8 + 12 and runs.groupby("stage").size().to_dict() == {"run": 8, "search": 12}
    assert {*runs["train.learning_rate"]} == {1e-3, 1e-2, 1e-1} and {*runs["split"]} == {"a", "b"}
    row = runs[runs.stage == "run"].iloc[0]
    assert (row["test, last"], row["MB up"], row["MB down"], row["seconds"]) == (0.5, 4.0, 2.0, 3.5)
    rounds = fedlora.results(tmp_path / "made.jsonl", by_round=True)
    mine = rounds[rounds.digest == row.digest]
    assert list(mine[mine.metric == "training loss"].value) == [1.0, 0.5] and math.isnan(mine.iloc[1].value)
    with pytest.raises(FileNotFoundError, match="has no results"):
        fedlora.results(tmp_path / "nothing")
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="folder of one run"):
        fedlora.results(tmp_path)
