"""What goes on reads what it read: inputs of a run, changed.

Kind of evidence: *enumeration*, end-to-end on tiny models. An input is anything that a run read; where it changed,
`run --resume` refuses and names it, and a new run has another digest. What no loader reads does not matter.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fedlora.runs.identity import digest_of
from support.command_line import Said, invoke, options
from support.projects import configured, make_project
from support.training_data import classification, rows

SETS = ("data.validation=valid.jsonl", "data.test=test.jsonl", "train.max_steps=1", "run.rounds=1")


def scaled(file: Path) -> None:
    tensors = load_file(file)
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name] + torch.ones_like(tensors[name]) / 100}, file, {"format": "pt"})


def text(more: str) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        file.parent.mkdir(exist_ok=True)
        file.write_text((file.read_text() if file.is_file() else "") + more)

    return change


# input -> (its file in the project, the change, what the error names)
INPUTS: Mapping[str, tuple[str, Callable[[Path], None], str]] = {
    "training data, a row more": ("train.jsonl", text(rows(classification(1, 99))), "site-"),
    "validation data": ("valid.jsonl", text(rows(classification(1, 99))), "data.validation.examples"),
    "test data": ("test.jsonl", text(rows(classification(1, 99))), "data.test"),
    "weights": ("model/model.safetensors", scaled, "model.safetensors"),
    "tokenizer": ("model/tokenizer.json", text(" "), "tokenizer.json"),
    "code of the model": ("model/modeling.py", text("x = 1"), "modeling.py"),
}
RESUME = ("run", "config.toml", "--out", "run", "--resume", *options(SETS))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a run that was stopped before its summary."""
    root = make_project(tmp_path_factory.mktemp("inputs") / "pristine")
    for name, seed in (("valid", 7), ("test", 8)):
        (root / f"{name}.jsonl").write_text(rows(classification(20, seed)))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        invoke(*RESUME)
    (root / "run" / "summary.json").unlink()
    return root


@pytest.fixture
def project(pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy: its files may move."""
    shutil.copytree(pristine, tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


def digest(root: Path, *more: str) -> str:
    return digest_of(configured(root, *SETS, *more))


@pytest.mark.parametrize("what", INPUTS)
def test_a_changed_input_is_named_by_what_goes_on(
    pristine: Path, project: Path, main: Callable[..., Said], what: str
) -> None:
    file, change, name = INPUTS[what]
    change(project / file)
    assert digest(project) != digest(pristine)
    assert name in main(*RESUME).error()


def test_what_no_loader_reads_does_not_matter(pristine: Path, project: Path, main: Callable[..., Said]) -> None:
    """A card, weights of another framework, times of a file."""
    for file in ("model/README.md", "model/onnx/model.onnx"):
        text("x")(project / file)
    os.utime(project / "model" / "config.json", (1, 1))
    assert digest(project) == digest(pristine)
    assert main(*RESUME).code == 0
    (project / "valid.jsonl").rename(project / "valid.csv")
    assert digest(project, "data.validation=valid.csv") != digest(pristine), "a file is read by its suffix"
