"""Tables, the paper's tables and pictures of made-up results. Kind: by hand, oracle (scipy)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedlora.errors import ConfigError
from fedlora.experiments import results
from fedlora.experiments.grid import Planned
from fedlora.experiments.paper import paper_of, paper_tables
from fedlora.experiments.pictures import drawn
from fedlora.experiments.scores import parse_number
from fedlora.experiments.spec import Experiment, load_experiment
from fedlora.experiments.stats import seeds_needed
from fedlora.experiments.tables import Table, categories, clients, costs, differences, scores, tables_of, warnings
from fedlora.experiments.tune import Progress
from support.made_results import line, progress_of

LAST = parse_number("test, last")
FILE = """
title = "Made"
reference = "old"
margin = 0.05
paper = "one"
[run.model]
name = "demo"
[run.data]
train = "demo"
[axes.split]
a = { "clients.dirichlet_alpha" = 0.1 }
b = { "clients.dirichlet_alpha" = 0.5 }
[axes.method]
old = { "method.name" = "fedit" }
new = { "method.name" = "glora" }
[profiles.mini]
seeds = [0, 1, 2]
"""
PAPER = """
[one]
caption = "A table."
times = 100
average = "AVG"
columns = [{ head = "A", at = { split = "a" } }, { head = "B", at = { split = "b" } }]
[one.rows]
old = ["50.0 ± 1.0", "60.0", "55.0"]
other = ["1.0", "2.0", "1.5"]
"""
ACCURACY: Mapping[tuple[str, str], list[float]] = {
    ("a", "old"): [0.5, 0.6, 0.7], ("a", "new"): [0.55, 0.7, 0.73],
    ("b", "old"): [0.5, 0.5, 0.5], ("b", "new"): [0.5, 0.5000001, 0.5],
}  # fmt: skip

TASKS = {"test": {"last": {"accuracy": 0.5, "group/t1": 0.5}, "best": {}}, "categories": {"t1": "QA"}}


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    (tmp_path / "made.toml").write_text(FILE)
    (tmp_path / "paper_numbers.toml").write_text(PAPER)
    return load_experiment(tmp_path / "made.toml")


def of(run: Planned, **more: Any) -> dict[str, Any]:
    score = ACCURACY[run.cell["split"], run.cell["method"]][run.seed]
    return line(run, {"accuracy": score}, [{"accuracy": score - 0.2}, {"accuracy": score}], **more)


def row(table: Table, *labels: str) -> Any:
    """The row with these labels."""
    return table.frame.set_index(list(table.frame.columns[: table.names])).loc[labels]


def test_scores_and_paired_differences_are_numpys_and_scipys(experiment: Experiment) -> None:
    progress = progress_of(experiment, of)
    table, old, new = scores(progress, LAST), ACCURACY["a", "old"], ACCURACY["a", "new"]
    assert list(table.frame.columns) == ["method", "split", "mean", "sd", "n", "planned"]
    found = row(table, "old", "a")
    assert found[["mean", "sd", "n"]].tolist() == pytest.approx([np.mean(old), np.std(old, ddof=1), 3])
    gaps = differences(progress, LAST)
    test = stats.ttest_rel(new, old)
    gap = row(gaps, "new", "a")
    assert gap[["difference", "p"]].tolist() == pytest.approx([np.mean(new) - np.mean(old), test.pvalue])
    assert (gap["low"], gap["high"]) == pytest.approx(tuple(test.confidence_interval(0.95)))
    assert gap["p (Holm)"] == pytest.approx(2 * test.pvalue) and gap["verdict"] == "undecided"
    assert gap["seeds needed"] == seeds_needed(float(np.std(np.subtract(new, old), ddof=1)), 0.05, 2), (
        "from three seeds on"
    )
    same = row(gaps, "new", "b")  # equal up to rounding
    assert same["difference"] == 0.0 and math.isnan(same["p"]) and same["verdict"] == "undecided"
    assert "verdict" not in differences(progress, parse_number("test, best")).frame, "the margin is of its own number"
    assert "verdict" in differences(progress, parse_number("test, best"), 0.1).frame


def test_of_a_loss_less_is_better(experiment: Experiment) -> None:
    def made(run: Planned) -> Any:
        return line(run, {"loss": 1.0 + (run.cell["method"] == "new") + run.seed / 99}, metric="loss")

    table = differences(progress_of(experiment, made), LAST, 0.01)
    assert set(table.frame["difference"]) == {1.0} and "Negative is better" in " ".join(table.notes)
    assert "0.693" in " ".join(table.notes), "ln 2: what guessing two classes scores"


def test_a_run_without_a_number_takes_mean_and_difference_away(experiment: Experiment) -> None:
    """The mean of the others would favour what fails. A seed that is not there yet is only missing."""

    def made(run: Planned) -> Any:
        if run.cell == {"split": "a", "method": "new"} and run.seed == 1:
            return results.failed(run, "no upload left")
        return None if run.cell == {"split": "b", "method": "new"} and run.seed == 2 else of(run)

    progress = progress_of(experiment, made)
    found = row(scores(progress, LAST), "new", "a")
    assert math.isnan(found["mean"]) and math.isnan(found["sd"]) and (found["n"], found["planned"]) == (2, 3)
    assert row(scores(progress, LAST), "new", "b")["mean"] == pytest.approx(0.5)
    assert not progress_of(experiment, lambda run: results.failed(run, "x") if run.seed else of(run)).whole
    gaps = differences(progress, LAST)
    assert gaps.frame["split"].tolist() == ["b"] and gaps.frame["n"].tolist() == [2]
    assert gaps.frame["seeds needed"].isna().all(), "two seeds do not tell a spread"
    assert any("new, a" in note for note in gaps.notes)
    assert any("seed 1 failed" in note for note in progress.notes()) and "10 of 12" in progress.notes()[-1]


def test_rounds_to_a_target_have_a_median_and_how_many_got_there(experiment: Experiment) -> None:
    """By hand: old in a reaches 0.55 with 0.6 and 0.7, in round 2; new with all three; nobody in b."""
    progress = progress_of(experiment, of)
    table = scores(progress, parse_number("rounds to 0.55"))
    assert [row(table, *at)["n"] for at in (("old", "a"), ("new", "a"), ("old", "b"))] == [2, 3, 0]
    assert row(table, "old", "a")["median"] == 2 and math.isinf(row(table, "old", "b")["median"])


def test_clients_own_models_on_their_own_data_are_not_compared(experiment: Experiment) -> None:
    def made(run: Planned) -> Any:
        own = run.cell["method"] == "new"
        sets = ["test"] if run.cell["split"] == "a" else []
        return of(run, target="clients" if own else "server", own_data=sets)

    table = differences(progress_of(experiment, made), LAST)
    assert table.frame["split"].tolist() == ["b"] and any("Not compared" in n and "new, a" in n for n in table.notes)
    notes = " ".join(scores(progress_of(experiment, made), LAST).notes)
    assert "new: the mean" in notes and "old:" not in notes


def test_mixtures_attacks_and_simulated_privacy_are_told(experiment: Experiment) -> None:
    def made(run: Planned) -> Any:
        found = of(run, commit="ab" if run.seed else "cd+dirty", privacy={"epsilon_planned": 3.0})
        found["read"] = {"model": f"m{run.seed}", "data": f"{run.cell['method']}{run.seed}"}
        found["config"]["attack"] = {"kind": "sign-flip", "fraction": 0.2, "clients": []}
        return found

    progress = progress_of(experiment, made)
    notes = " ".join(scores(progress, LAST).notes)
    assert "2 commits: ab, cd+dirty" in notes and "the same data" in notes and "the same model" in notes
    assert "the same" not in " ".join(scores(progress_of(experiment, of), LAST).notes)
    assert [word in " ".join(warnings(progress)) for word in ("UNDER ATTACK", "simulations")] == [True, True]


def test_costs_clients_and_categories_are_means(experiment: Experiment) -> None:
    own = {"a": {"accuracy": 0.2}, "b": {"accuracy": 0.4}}
    tasks = {"test": {"last": {"group/t1": 0.1, "group/t2": 0.3, "group/t3": 0.8}, "best": {}},
             "categories": {"t1": "QA", "t2": "QA", "t3": "Logic"}}  # fmt: skip
    drift = {"gauge_drift": {"glora": 0.25, "fedit": 0.5}}
    progress = progress_of(experiment, lambda run: of(run, clients_at_end=own, ranks={"a": 2, "b": 4}) | tasks | drift)
    found = row(costs(progress), "new", "a")
    assert found.tolist() == [4.0, 2.0, 3.5, 0.5, 0.25]
    assert clients(progress).frame["new, a"].tolist() == pytest.approx([0.2, 0.4])
    assert "accuracy (0 to 1)" in clients(progress).notes[0]
    assert categories(progress, LAST).frame["new, a"].tolist() == pytest.approx([0.8, 0.2]), "Logic, QA"
    assert len(tables_of(progress)) == 4, "no pair has a number"


def test_the_papers_table_has_our_number_its_own_and_the_gap(experiment: Experiment) -> None:
    """By hand, times 100; a row that only we have, and one that only the paper has."""
    progress, paper = progress_of(experiment, of), paper_of(experiment)
    assert paper is not None
    last, best = paper_tables(progress, paper)
    rows = {tuple(r[:2]): r[2:] for r in last.frame.values.tolist()}
    assert rows["old", "ours"] == ["60.00 ± 10.00", "50.00 ± 0.00", "55.00 ± 5.00"]
    assert rows["old", "paper"] == ["50.0 ± 1.0", "60.0", "55.0"]
    assert rows["old", "ours - paper"] == ["+10.00", "-10.00", "+0.00"]
    assert ("new", "paper") not in rows and rows["other", "paper"] == ["1.0", "2.0", "1.5"]
    assert "best on validation" in best.notes[0] and list(last.frame.columns) == ["method", "", "A", "B", "AVG"]
    half = Progress(progress.grid, {d: x for d, x in progress.lines.items() if x["cell"]["split"] == "a"})
    rows = {tuple(r[:2]): r[2:] for r in paper_tables(half, paper)[0].frame.values.tolist()}
    assert rows["old", "ours"] == ["60.00 ± 10.00", "", ""], "no average of what is not whole"
    assert experiment.folder is not None
    (experiment.folder / "paper_numbers.toml").write_text(PAPER.replace("times = 100\n", ""))
    once = paper_of(experiment)
    assert once is not None and paper_tables(progress, once)[0].frame["A"][0] == "0.60 ± 0.10"


def test_a_wrong_file_of_printed_numbers_is_named(experiment: Experiment) -> None:
    """No such table, a row of two numbers for three columns, and a column that is two of our cells."""
    assert experiment.folder is not None
    for old, new, said in (("one", "two", "has only: two"), ('"60.0", "55.0"', '"60.0"', "3 columns .* has 2 numbers")):
        (experiment.folder / "paper_numbers.toml").write_text(PAPER.replace(old, new))
        with pytest.raises(ConfigError, match=said):
            paper_of(experiment)
    (experiment.folder / "paper_numbers.toml").write_text(PAPER.replace('at = { split = "a" }', "at = {}"))
    paper = paper_of(experiment)
    assert paper is not None
    with pytest.raises(ConfigError, match="is 2 of ours"):
        paper_tables(progress_of(experiment, of), paper)


def test_each_kind_of_picture_is_drawn(experiment: Experiment, tmp_path: Path) -> None:
    """Curves and differences; by an axis of numbers; categories. Nothing of nothing."""
    progress = progress_of(experiment, of)
    assert [path.name for path in drawn(progress, tmp_path / "p.png")] == ["p.png", "p-differences.png"]
    assert drawn(Progress(progress.grid, {}), tmp_path / "none.png") == []
    numbers = {
        "method": {"0.1": {"method.name": "fedit"}, "1": {"method.name": "glora"}},
        "split": {"2": {"train.max_steps": 2}, "3": {"train.max_steps": 3}},
    }
    other = experiment.model_copy(update={"axes": numbers, "reference": "1"})
    made = progress_of(other, lambda run: line(run, {"accuracy": 0.5 + run.seed / 10}) | TASKS)
    paths = drawn(made, tmp_path / "n.png")
    assert len(paths) == 2 and all(path.stat().st_size > 5000 for path in paths)
