"""What TensorBoard is told, read back from its event files. Kind of evidence: end-to-end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedlora.runs.folder import RunFolder
from fedlora.runs.tracking import numbers, numbers_of_test
from support.known_warnings import FUTURE_NAMES, NOT_ON_THE_HUB
from support.projects import configured, ran

pytestmark = [FUTURE_NAMES, NOT_ON_THE_HUB]

SETS = ("run.rounds=3", "train.steps=2", "run.track=['tensorboard']")


def told(folder: RunFolder) -> tuple[dict[str, list[tuple[int, float]]], Any]:
    """Name -> (round, value) of every point, in their order; and the configuration."""
    events = EventAccumulator(str(folder.path / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    points = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    return points, json.loads(text.removeprefix("```json\n").removesuffix("\n```"))


def assert_told_everything(folder: RunFolder) -> None:
    points, config = told(folder)
    lines, s = folder.metrics(), folder.read_json("summary.json")
    assert config == folder.read_json("config.json")
    want: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        for name, value in line["metrics"].items():
            want.setdefault(f"metrics/{name}", []).append((line["round"], value))
        for client, loss in line["losses"].items():
            want.setdefault(f"loss/{client}", []).append((line["round"], loss))
        want.setdefault("loss", []).append((line["round"], line["loss"]))
        want.setdefault("bytes", []).append((line["round"], line["bytes"]["total"]))
    for which, name, round in (("last", "test", s["rounds"]), ("best", "test_best", s["best_round"])):
        want |= {f"{name}/{score}": [(round, value)] for score, value in s["test"][which].items()}
    assert {"metrics/macro_f1", "metrics/recall/red", "loss/site-1", "test/matthews", "test_best/loss"} <= set(want)
    for name, expected in want.items():
        assert [step for step, _ in points[name]] == [step for step, _ in expected], name
        assert [value for _, value in points[name]] == pytest.approx([value for _, value in expected], rel=1e-6), name


def test_every_score_of_every_round_and_the_test_at_the_end(project: Path, tmp_path: Path) -> None:
    assert_told_everything(ran(configured(project, *SETS), tmp_path / "run"))


@pytest.mark.parametrize("rounds", [2, 3])
def test_after_a_resume_no_point_is_lost_or_told_twice(project: Path, tmp_path: Path, rounds: int) -> None:
    """checkpoint_every = 2: round 3 was told, and is played again; after it, only the results were missing."""
    config = configured(project, *SETS, "run.checkpoint_every=2")
    folder = ran(config, tmp_path / "run", rounds)
    (folder.path / "tensorboard" / "notes.txt").write_text("mine")
    ran(config, folder.path, resume=True)
    assert_told_everything(folder)
    assert (folder.path / "tensorboard" / "notes.txt").exists(), "only event files are replaced"


def test_what_is_no_number_is_not_told() -> None:
    """JSON's null of a diverged client, and NaN of a score."""
    line = {
        "round": 1, "loss": 1.0, "losses": {"a": 1.0, "b": None}, "metrics": {"accuracy": 0.5, "loss": None},
        "seconds": {"train": 2}, "bytes": {"total": 8}, "server_rank": None, "padded_error": None,
    }  # fmt: skip
    assert numbers(line) == {"metrics/accuracy": 0.5, "loss/a": 1.0, "loss": 1.0, "seconds/train": 2, "bytes": 8}
    assert numbers_of_test({"accuracy": 0.5, "loss": float("nan")}, best=True) == {"test_best/accuracy": 0.5}
