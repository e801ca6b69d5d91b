"""What trackers get: TensorBoard, read back from its event files; trackio, wandb and mlflow, by stand-ins of the
calls that we make. Kind of evidence: end-to-end."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedlora.runs.folder import RunFolder
from support.command_line import invoke, options
from support.projects import configured, ran

SETS = ("run.rounds=3", "train.max_steps=2", "run.report_to=['tensorboard']")


def logged(folder: RunFolder) -> tuple[dict[str, list[tuple[int, float]]], Any]:
    """Name -> (round, value) of every point, in their order; and the configuration."""
    events = EventAccumulator(str(folder.path / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    points = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    return points, json.loads(text.removeprefix("```json\n").removesuffix("\n```"))


def assert_has_everything(folder: RunFolder) -> None:
    points, config = logged(folder)
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
        want.setdefault("clients", []).append((line["round"], len(line["weights"])))
    for which, name, round in (("last", "test", s["rounds"]), ("best", "test_best", s["best_round"])):
        want |= {f"{name}/{score}": [(round, value)] for score, value in s["test"][which].items()}
    assert {"metrics/macro_f1", "loss/site-1", "test/macro_f1", "test_best/loss"} <= set(want)
    for name, expected in want.items():
        assert [step for step, _ in points[name]] == [step for step, _ in expected], name
        assert [value for _, value in points[name]] == pytest.approx([value for _, value in expected], rel=1e-6), name


def test_after_a_resume_no_point_is_lost_or_there_twice(project: Path, tmp_path: Path) -> None:
    """checkpoint_every = 2: round 3 was logged, and is played again."""
    config = configured(project, *SETS, "run.checkpoint_every=2", "run.rounds=4")
    folder = ran(config, tmp_path / "run", 3)
    (folder.path / "tensorboard" / "notes.txt").write_text("mine")
    ran(config, folder.path, resume=True)
    assert_has_everything(folder)
    assert (folder.path / "tensorboard" / "notes.txt").exists(), "only event files are replaced"


def test_a_comparison_is_one_group_of_named_runs_at_each_tracker(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two methods in one process: two runs, in the group of the configuration's name, each with its rounds, its test
    scores and its settings. MLflow takes a hundred params at once, and no odd letters in names."""
    trackio, wandb, mlflow = (MagicMock() for _ in range(3))
    for name, library in (("trackio", trackio), ("wandb", wandb), ("mlflow", mlflow)):
        monkeypatch.setitem(sys.modules, name, library)
    less = ["run.report_to=['trackio','wandb','mlflow']", "run.rounds=1", "train.max_steps=1", "evaluate.metric=loss"]
    words = ("--methods", "fedsvd,glora", *options(less), "--out", tmp_path / "out")
    invoke("compare", project / "config.toml", *words)
    runs, wanted = ["fedsvd, seed 0", "glora, seed 0"], {"metrics/loss", "loss", "loss/site-1", "test/loss"}
    for library in (trackio, wandb):
        begun = [call.kwargs for call in library.init.call_args_list]
        assert [(one["name"], one["group"]) for one in begun] == [(name, "config-compare") for name in runs]
        assert begun[0]["config"]["run"]["rounds"] == 1 and library.finish.call_count == 2
        points = [call.args[0] for call in library.log.call_args_list]
        assert wanted | {"round"} <= {name for point in points for name in point}
        assert {point["round"] for point in points} == {1}
    assert [call.kwargs["run_name"] for call in mlflow.start_run.call_args_list] == runs
    assert mlflow.set_experiment.call_args.args == ("config-compare",) and mlflow.end_run.call_count == 2
    params = [call.args[0] for call in mlflow.log_params.call_args_list]
    assert max(map(len, params)) <= 100 and params[0]["train.max_steps"] == "1"
    names = {name for call in mlflow.log_metrics.call_args_list for name in call.args[0]}
    assert wanted <= names and all(re.fullmatch(r"[\w\-. :/]+", name, re.ASCII) for name in names)
