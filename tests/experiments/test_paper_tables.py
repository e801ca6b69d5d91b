"""The six tables as the paper states them: one row of its own readings, pinned inputs, notes that name our choices.

Kind of evidence: *contract*, on the files of experiments/.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fedlora.experiments.grid import Grid
from fedlora.experiments.spec import load_experiment
from fedlora.methods import build

ROOT = Path(__file__).parents[2]
TABLES = sorted((ROOT / "experiments").glob("table*.toml"))


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_a_table_has_the_papers_row_and_says_what_it_chose(path: Path) -> None:
    """All that the paper leaves open, and what differs from its text, is named in the note."""
    experiment = load_experiment(path)
    runs = Grid(experiment, "paper").waiting
    literal = {run.config.method.build() for run in runs if "GLoRA (paper)" in run.cell.values()}
    assert literal == {build("glora-paper")}
    note = experiment.profile("paper").note
    for word in ("alpha = 2 r", "dropout", "held out" if path.stem != "table3" else "holds out", "constant rate", "TF32"
                 if path.stem != "table4" else "bfloat16", "three seeds", "glora-paper", "begins anew"):  # fmt: skip
        assert word in note, word
    for config in (run.config for run in runs):
        if path.stem != "table3":
            assert len(config.model.revision or "") == len(config.data.revision or "") == 40
    assert len(TABLES) == 6


def test_the_tasks_of_table_3_are_the_same_for_each_seed_and_for_the_search() -> None:
    """Drawn once, in two files beside the table, whose content is part of what a run is."""
    experiment = load_experiment(ROOT / "experiments" / "table3.toml")
    runs = [*Grid(experiment, "paper").searches, *Grid(experiment, "paper").waiting]
    lists = {tuple(run.config.data.task_lists) for run in runs}
    assert len({run.config.run.seed for run in runs}) == 4 and len(lists) == 1
    clients, unseen = (Path(place).read_text().split() for place in lists.pop())
    assert (len(set(clients)), len(set(unseen)), {*clients} & {*unseen}) == (50, 20, set())
    assert all({"data.task_lists.0", "data.task_lists.1"} <= run.files.keys() for run in runs)
