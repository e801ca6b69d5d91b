"""What trackers get: TensorBoard, read back from its event files; trackio, wandb and mlflow, by stand-ins of the
calls that we make. Kind of evidence: end-to-end."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedlora.runs.folder import RunFolder
from support.command_line import invoke
from support.known_warnings import FUTURE_NAMES, NOT_ON_THE_HUB
from support.projects import configured, ran

pytestmark = [FUTURE_NAMES, NOT_ON_THE_HUB]

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
    for which, name, round in (("last", "test", s["rounds"]), ("best", "test_best", s["best_round"])):
        want |= {f"{name}/{score}": [(round, value)] for score, value in s["test"][which].items()}
    assert {"metrics/macro_f1", "loss/site-1", "test/matthews", "test_best/loss"} <= set(want)
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


class Library:
    """Stands for trackio, wandb or mlflow: records what it is told, and starts a run only after the last one ended."""

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []
        self.going = False
        self.experiment = ""

    def init(self, *, project: str, name: str, group: str | None, config: dict[str, Any]) -> None:
        assert not self.going
        self.going = True
        self.runs.append({"name": name, "group": group, "config": config, "points": []})

    def log(self, numbers: dict[str, float]) -> None:
        self.runs[-1]["points"].append(numbers)

    def finish(self) -> None:
        self.going = False

    def set_experiment(self, name: str) -> None:
        self.experiment = name

    def start_run(self, *, run_name: str) -> None:
        self.init(project="", name=run_name, group=self.experiment, config={})

    def log_params(self, params: dict[str, str]) -> None:
        assert len(params) <= 100
        self.runs[-1]["params"] = {**self.runs[-1].get("params", {}), **params}

    def log_dict(self, config: dict[str, Any], path: str) -> None:
        self.runs[-1]["config"] = config

    def log_metrics(self, numbers: dict[str, float], *, step: int) -> None:
        assert all(re.fullmatch(r"[\w\-. :/]+", name, re.ASCII) for name in numbers), "MLflow refuses the others"
        self.log({"round": step, **numbers})

    end_run = finish


def test_a_comparison_is_one_group_of_named_runs_at_each_tracker(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two methods in one process: two runs, in the group of the configuration's name, each with its rounds, its test
    scores and its settings. Tracking changes no run: the digests are those of runs without it."""
    monkeypatch.setattr("fedlora.runs.manifest.commit_of_code", lambda: {"id": "a" * 40, "clean": True})
    libraries = {name: Library() for name in ("trackio", "wandb", "mlflow")}
    for name, library in libraries.items():
        monkeypatch.setitem(sys.modules, name, library)  # type: ignore[arg-type]
    track = f"run.report_to={[*libraries]}"
    less = ("run.rounds=1", "train.max_steps=1", "evaluate.metric=loss")
    assert configured(project, track, *less).digest() == configured(project, *less).digest()
    sets = [part for one in (track, *less) for part in ("--set", one)]
    invoke("compare", project / "config.toml", "--methods", "fedsvd,glora", *sets, "--out", tmp_path / "out")
    for library in libraries.values():
        assert [run["name"] for run in library.runs] == ["fedsvd, seed 0", "glora, seed 0"]
        for run in library.runs:
            assert run["group"] == "config-compare" and run["config"]["run"]["rounds"] == 1
            names = {name for point in run["points"] for name in point}
            assert {"round", "metrics/loss", "loss", "loss/site-1", "test/loss", "test_best/loss"} <= names
            assert {point["round"] for point in run["points"]} == {1}
    assert libraries["mlflow"].runs[0]["params"]["train.max_steps"] == "1"


def test_test_scores_along_the_curve(project: Path, tmp_path: Path) -> None:
    """Scored at each evaluation; the last one is the test score of the summary."""
    folder = ran(configured(project, "run.rounds=2", "train.max_steps=2", "evaluate.test_along=true"), tmp_path / "run")
    lines, test = folder.metrics(), folder.read_json("summary.json")["test"]["last"]
    assert all("test/accuracy" in line["metrics"] for line in lines)
    assert {name: lines[-1]["metrics"][f"test/{name}"] for name in ("accuracy", "loss")} == {
        name: test[name] for name in ("accuracy", "loss")
    }
