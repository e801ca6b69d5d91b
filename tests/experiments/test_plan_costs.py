"""What `--plan` counts: each run by itself, from its data. Kind of evidence: *by hand*.

Two clients of 10 and 3 examples in batches of 4. Three steps are 3 * 4 + 3 * 3 = 21 examples a round; two epochs are
ceil(20 / 4) * 4 + ceil(6 / 3) * 3 = 26.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fedlora.experiments.costs import Workloads, examples_of
from fedlora.runs.client_data import deal
from fedlora.runs.config import parse_config
from fedlora.server.sampling import sample_clients
from support.command_line import invoke

EXPERIMENT = """title = "t"
question = "q"
[run.model]
path = "m"
[run.data]
validation = "v.jsonl"
test = "t.jsonl"
max_length = 64
[run.data.clients]
large = "large.jsonl"
small = "small.jsonl"
[run.clients]
ranks = [2, 2]
[run.train]
batch_size = 4
[run.run]
rounds = 2
[run.evaluate]
every = 1
[axes.length]
steps = { "train.steps" = 3 }
epochs = { "train.steps" = 0, "train.epochs" = 2.0 }
[axes.method]
GLoRA = { "method.name" = "glora" }
FedIT = { "method.name" = "fedit" }
FedSA = { "method.name" = "fedsa-lora" }
[tune]
values = [1e-3, 1e-2]
over = ["method"]
[profiles.mini]
seeds = [0, 1]
axes = { method = ["GLoRA", "FedIT"] }
[profiles.more]
seeds = [0, 1]
tune = [1e-3]
set = { "run.rounds" = 5 }
[profiles.steps]
seeds = [0]
tune = [1e-3]
axes = { method = ["FedIT"], length = ["steps"] }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.toml").write_text(EXPERIMENT)
    for name, count in {"large": 10, "small": 3, "v": 5, "t": 7}.items():
        rows = [{"text": f"{name} {k}", "label": "ab"[k % 2]} for k in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def planned(folder: Path, *more: Any) -> tuple[dict[str, str], str]:
    """The row of the plan by its columns, and all that was said."""
    where = ["--results", folder / "results", "--work", folder / "work"]
    done = invoke("experiment", "run", folder / "mine.toml", "--plan", *where, *more, code=1)
    head, row = (next(line for line in done.stdout.splitlines() if mark in line) for mark in ("search runs", "│ mine"))
    cells = [[cell.strip() for cell in line.strip("┃│ ").replace("┃", "│").split("│")] for line in (head, row)]
    return dict(zip(*cells, strict=True)), done.stdout + done.stderr


def test_epochs_and_steps_searched_and_not_yet_searched(folder: Path) -> None:
    """Search: 2 methods x 2 lengths x 2 values; then 2 x 2 x 2 seeds, which wait for it. Half of each are epochs."""
    row, said = planned(folder, "--price", "2.5")
    examples = (4 * 21 + 4 * 26) * 2 + (4 * 21 + 4 * 26) * 2
    assert (row["search runs"], row["runs"]) == ("8", "8") and row["examples to train"] == f"{examples:,}" == "752"
    assert row["texts to score"] == f"at most {16 * (2 * 5 + 2 * 7)}", (
        "validation each round; the test at the last and the best"
    )
    assert re.match("unknown: .* 16 runs", row["hours"]) and re.match("unknown", row["price"])
    numbers = ("tokens to train", "MB that travel")
    assert {row[name] for name in numbers} == {"not counted"} and "model.path = 'm'" in said


def test_another_profile_is_of_its_own_rounds_and_methods(folder: Path) -> None:
    """FedSA-LoRA has no model of the server's: each of its two clients is measured."""
    row, _ = planned(folder, "--profile", "more")
    assert row["examples to train"] == f"{6 * 5 * 21 + 6 * 5 * 26:,}" == "1,410"
    assert row["texts to score"] == f"at most {8 * (5 * 5 + 2 * 7) + 4 * (5 * 10 + 2 * 14)}"
    assert re.match("unknown: .* 12 runs", row["hours"])


def test_without_its_data_a_run_by_epochs_has_no_number(folder: Path) -> None:
    """Of steps there is a bound, and it is called one: whole batches, 2 clients x 2 rounds x 3 x 4. Half of the sixteen
    runs train by steps, and are counted without the others."""
    (folder / "small.jsonl").unlink()
    row, said = planned(folder)
    assert row["examples to train"] == f"at most {8 * 48} (8 of 16 runs)" and row["texts to score"] == "not counted"
    assert "small.jsonl does not exist" in said and "8 runs" in row["hours"]
    row, said = planned(folder, "--profile", "steps")
    assert row["examples to train"] == "at most 48" and row["texts to score"] == "not counted"


def test_clients_own_test_sets_are_scored_at_the_end(folder: Path) -> None:
    """Five texts of validation in each of two rounds, the seven of the test set at the last and at the best; then each
    of the two clients' readouts on its own set and on the common one."""
    train = [{"text": f"text {k}", "label": "ab"[k % 2]} for k in range(40)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in train))
    files = {part: str(folder / name) for part, name in
             {"train": "train.jsonl", "validation": "v.jsonl", "test": "t.jsonl"}.items()}  # fmt: skip
    config = parse_config({
        "model": {"path": "m"}, "data": files, "clients": {"count": 2, "ranks": [2], "own_test": 0.25},
        "run": {"rounds": 2}, "evaluate": {"every": 1, "clients_at_end": "both"},
    })  # fmt: skip
    own = sum(map(len, deal(config, None).own_test.values()))
    assert 8 <= own <= 12 and Workloads(None).of(config).scored == 2 * 5 + 2 * 7 + own + 2 * 7


def test_a_part_of_the_clients_counts_as_it_is_drawn() -> None:
    """Sizes 1, 2, ..., 5 in batches of 100, one step, half of them a round: 2.5 is rounded up, as the engine does."""
    sizes = {name: k + 1 for k, name in enumerate("abcde")}
    run = {"participation": 0.5, "seed": 3, "rounds": 4}
    config = parse_config({"model": {"path": "m"}, "data": {"train": "x.csv"}, "clients": {"ranks": [2]}, "run": run,
                           "train": {"steps": 1, "batch_size": 100}})  # fmt: skip
    drawn = [sample_clients(list(sizes), 0.5, seed=3, round=k) for k in range(4)]
    assert all(len(names) == 3 for names in drawn)
    assert examples_of(config, sizes) == sum(sizes[name] for names in drawn for name in names)
