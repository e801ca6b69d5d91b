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

from fedlora.runs.config import load_config
from fedlora.runs.identity import digest_of
from support.command_line import Said, invoke
from support.known_warnings import FUTURE_NAMES, NOT_ON_THE_HUB
from support.training_data import classification, rows, save_encoder

pytestmark = [FUTURE_NAMES, NOT_ON_THE_HUB]

CONFIG = """
[model]
name = "model"
dropout = 0.0
[data]
train = "train.jsonl"
validation = "valid.jsonl"
test = "test.jsonl"
[clients]
ranks = [2, 2]
test_fraction = 0.2
[lora]
target_modules = ["query"]
[train]
max_steps = 1
batch_size = 8
[evaluate]
clients_at_end = true
[run]
rounds = 1
threads = 1
"""


def scaled(file: Path) -> None:
    tensors = load_file(file)
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name] + torch.ones_like(tensors[name]) / 100}, file, {"format": "pt"})


def text(more: str) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        file.parent.mkdir(exist_ok=True)
        file.write_text((file.read_text() if file.is_file() else "") + more)

    return change


def reversed_rows(file: Path) -> None:
    file.write_text("".join(reversed(file.read_text().splitlines(keepends=True))))


def one_more(file: Path) -> None:
    file.write_text(file.read_text() + rows(classification(1, 99)))


# input -> (its file in the project, the change, what the error names)
INPUTS: Mapping[str, tuple[str, Callable[[Path], None], str]] = {
    "training data, a row more": ("train.jsonl", one_more, "site-"),
    "training data, order of rows": ("train.jsonl", reversed_rows, "site-"),
    "validation data": ("valid.jsonl", one_more, "data.validation.examples"),
    "test data": ("test.jsonl", one_more, "data.test"),
    "weights": ("model/model.safetensors", scaled, "model.safetensors"),
    "tokenizer": ("model/tokenizer.json", text(" "), "tokenizer.json"),
    "code of the model": ("model/modeling.py", text("x = 1"), "modeling.py"),
}
HARMLESS: Mapping[str, tuple[str, Callable[[Path], None]]] = {
    "card": ("model/README.md", text("x")),
    "weights of another framework": ("model/onnx/model.onnx", text("x")),
    "times of a file": ("model/config.json", lambda file: os.utime(file, (1, 1))),
}
RESUME = ("run", "config.toml", "--out", "stopped", "--resume")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a run that was stopped before its summary; `restored` before each test."""
    root = tmp_path_factory.mktemp("inputs") / "project"
    save_encoder(root / "model")
    for name, count, seed in (("train", 80, 0), ("valid", 20, 7), ("test", 20, 8)):
        (root / f"{name}.jsonl").write_text(rows(classification(count, seed)))
    (root / "config.toml").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        invoke(*RESUME)
    (root / "stopped" / "summary.json").unlink()
    shutil.copytree(root, root.with_name("pristine"))
    return root


@pytest.fixture
def restored(world: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.rmtree(world)
    shutil.copytree(world.with_name("pristine"), world)
    monkeypatch.chdir(world)
    return world


def digest(root: Path) -> str:
    return digest_of(load_config(root / "config.toml"))


@pytest.mark.parametrize("what", INPUTS)
def test_a_changed_input_is_named_by_what_goes_on(restored: Path, main: Callable[..., Said], what: str) -> None:
    file, change, name = INPUTS[what]
    before = digest(restored)
    change(restored / file)
    assert digest(restored) != before
    assert name in main(*RESUME).error()


def test_what_no_loader_reads_does_not_matter(restored: Path, main: Callable[..., Said]) -> None:
    before = digest(restored)
    for file, change in HARMLESS.values():
        change(restored / file)
    assert digest(restored) == before
    assert main(*RESUME).code == 0


def test_the_place_of_the_files_does_not_matter(restored: Path) -> None:
    elsewhere = shutil.copytree(restored, restored.with_name("elsewhere"))
    assert digest(elsewhere) == digest(restored)
    (elsewhere / "config.toml").write_text(CONFIG.replace("valid.jsonl", "valid.csv"))
    (elsewhere / "valid.jsonl").rename(elsewhere / "valid.csv")
    assert digest(elsewhere) != digest(restored), "a file is read by its suffix"
