"""What goes on reads what it read: every input of a run, changed or replaced, under each command that goes on.

Kind of evidence: *enumeration*, end-to-end on tiny models. An input is anything that a run read; where it is another
one by now, `run --resume` (unfinished, finished), `compare --resume` (with work left, with none) and an experiment
either refuse and name it, before anything is trained, or (an experiment with files of its own) take no old result for
it. What provably does not matter is accepted. The list of inputs is written by hand; that all are distinct entries of
a manifest is asked below.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from huggingface_hub.constants import HF_HUB_CACHE
from safetensors.torch import load_file, save_file

from fedlora.experiments.drive import Store
from fedlora.experiments.grid import Grid
from fedlora.experiments.spec import load_experiment
from fedlora.experiments.work import Work
from fedlora.runs.client_data import deal
from fedlora.runs.config import load_config
from support.command_line import Said, invoke
from support.known_warnings import FUTURE_NAMES, NOT_ON_THE_HUB
from support.training_data import classification, rows, save_encoder

pytestmark = [FUTURE_NAMES, NOT_ON_THE_HUB]

CONFIG = """
[model]
path = "{model}"
dropout = 0.0
[data]
train = "train.jsonl"
validation = "valid.jsonl"
test = "test.jsonl"
[clients]
ranks = [2, 2]
own_test = 0.2
[method]
name = "{method}"
[lora]
targets = ["query"]
[train]
steps = 1
batch_size = 8
[evaluate]
clients_at_end = true
[run]
rounds = 2
threads = 1
"""
EXPERIMENT = """
title = "t"
question = "?"
metric = "test, last"
rows = "method"
[axes.method]
own = {{ "method.name" = "{method}" }}
[profiles.mini]
seeds = [0]
"""


def scaled(file: Path) -> None:
    tensors = load_file(file)
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name] + torch.ones_like(tensors[name]) / 100}, file, {"format": "pt"})


def text(more: str) -> Callable[[Path], None]:
    return lambda file: (
        file.parent.mkdir(exist_ok=True)
        or file.write_text(  # type: ignore[func-returns-value]
            (file.read_text() if file.is_file() else "") + more
        )
    )


def reversed_rows(file: Path) -> None:
    file.write_text("".join(reversed(file.read_text().splitlines(keepends=True))))


def one_more(file: Path) -> None:
    file.write_text(file.read_text() + rows(classification(1, 99)))


def other_rows(file: Path) -> None:
    """Another file of this name with another time and inode, in place of it."""
    aside = file.with_suffix(".new")
    aside.write_text(rows(classification(60, 77)))
    os.replace(aside, file)


def own_test_alone(file: Path) -> None:
    """Other words in the clients' own test sets, and nowhere else."""
    dealt = deal(load_config(file.parent / "config.toml"), None)
    held = {sentence for part in dealt.own_test.values() for sentence in part.text}
    told = [json.loads(line) for line in file.read_text().splitlines()]
    moved = [{**row, "text": f"{row['text']} w9"} if row["text"] in held else row for row in told]
    file.write_text("".join(json.dumps(row) + "\n" for row in moved))


# input -> (its file in the project, the change, what a refusal names)
INPUTS: Mapping[str, tuple[str, Callable[[Path], None], str]] = {
    "training data, a row more": ("train.jsonl", one_more, "site-"),
    "training data, replaced": ("train.jsonl", other_rows, "site-"),
    "training data, order of rows": ("train.jsonl", reversed_rows, "site-"),
    "clients' own test sets alone": ("train.jsonl", own_test_alone, "own test set of 'site-"),
    "validation data": ("valid.jsonl", one_more, "validation"),
    "test data": ("test.jsonl", one_more, "test data"),
    "weights in a folder": ("model/weights/part-1.safetensors", scaled, "weights/part-1.safetensors"),
    "index of the weights": ("model/model.safetensors.index.json", text(" "), "model.safetensors.index.json"),
    "model's configuration": ("model/config.json", text(" "), "config.json"),
    "tokenizer": ("model/tokenizer.json", text(" "), "tokenizer.json"),
    "slow tokenizer, byte pairs": ("model/bpe.codes", text("x"), "bpe.codes"),
    "slow tokenizer, sentence pieces": ("model/source.spm", text("x"), "source.spm"),
    "slow tokenizer, ranks": ("model/x.tiktoken", text("x"), "x.tiktoken"),
    "chat template": ("model/chat_template.jinja", text("x"), "chat_template.jinja"),
    "further chat template": ("model/additional_chat_templates/a.jinja", text("x"), "a.jinja"),
    "generation settings": ("model/generation_config.json", text("{}"), "generation_config.json"),
    "code of the model": ("model/modeling.py", text("x = 1"), "modeling.py"),
}
HARMLESS: Mapping[str, tuple[str, Callable[[Path], None]]] = {
    "card": ("model/README.md", text("x")),
    "licence": ("model/LICENSE.txt", text("x")),
    "weights of another framework": ("model/onnx/model.onnx", text("x")),
    "pickled weights": ("model/pytorch_model.bin", text("x")),
    "state of a download": ("model/.cache/x", text("x")),
    "times of a file": ("model/config.json", lambda file: os.utime(file, (1, 1))),
}


def make(root: Path, model: str = "model", method: str = "glora") -> Path:
    root.mkdir(exist_ok=True)
    folder = save_encoder(root / "model")
    (folder / "weights").mkdir()
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "weights" / "part-1.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(tensors, "weights/part-1.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, count, seed in (("train", 80, 0), ("valid", 20, 7), ("test", 20, 8)):
        (root / f"{name}.jsonl").write_text(rows(classification(count, seed)))
    config = CONFIG.format(model=model, method=method)
    (root / "config.toml").write_text(config)
    tables = config.replace("[model]", "[run.model]")
    for table in ("data", "clients", "lora", "train", "evaluate", "run"):
        tables = tables.replace(f"\n[{table}]", f"\n[run.{table}]")
    head, _, axes = EXPERIMENT.format(method=method).partition("[axes")
    tables = tables.replace(f'[method]\nname = "{method}"\n', "")
    (root / "mine.toml").write_text(f"{head}\n{tables}\n[axes{axes}")
    return root


def compare(methods: str, *more: object) -> list[object]:
    return ["compare", "config.toml", "--methods", methods, "--seeds", "0", "--out", "compared", *more]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a finished run, one that was stopped, a comparison and an experiment; `restored` before each."""
    root = make(tmp_path_factory.mktemp("inputs") / "project")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        invoke("run", "config.toml", "--out", "finished")
        invoke("experiment", "run", "mine.toml", "--results", "results", "--work", "work")
    shutil.copytree(root / "finished", root / "stopped")
    (root / "stopped" / "summary.json").unlink()
    (root / "stopped" / "SHA256SUMS").unlink()
    shutil.copytree(root, root.with_name("pristine"))
    return root


@pytest.fixture
def restored(world: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.rmtree(world)
    shutil.copytree(world.with_name("pristine"), world)
    monkeypatch.chdir(world)
    return world


GOES_ON: Mapping[str, list[object]] = {
    "run, stopped": ["run", "config.toml", "--out", "stopped", "--resume"],
    "run, finished": ["run", "config.toml", "--out", "finished", "--resume"],
}


def lacks(root: Path) -> int:
    """How many runs the experiment has no result for."""
    store = Store(root / "results" / "mine.jsonl", Work(root / "work"))
    return len(store.progress(Grid(load_experiment(root / "mine.toml"), "mini")).missing("run"))


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("what", INPUTS)
def test_a_changed_input_is_named_by_whatever_goes_on(
    restored: Path, main: Callable[..., Said], capsys: pytest.CaptureFixture[str], what: str, every: int
) -> None:
    """An experiment takes no result of it. every: each input meets each so many-th command."""
    file, change, name = INPUTS[what]
    assert lacks(restored) == 0
    change(restored / file)
    for command, words in list(GOES_ON.items())[list(INPUTS).index(what) % every :: every]:
        said = main(*words).error()
        assert name in said, (command, said)
    assert lacks(restored) == 1


def test_what_no_loader_reads_does_not_matter(restored: Path, main: Callable[..., Said]) -> None:
    for file, change in HARMLESS.values():
        change(restored / file)
    for command, words in GOES_ON.items():
        assert main(*words).code == 0, command
    assert lacks(restored) == 0


def test_what_is_gone_is_said_once_and_the_result_is_shown(restored: Path, main: Callable[..., Said]) -> None:
    (restored / "train.jsonl").unlink()
    said = main(*GOES_ON["run, finished"])
    assert said.code == 0 and said.err.count("train.jsonl") == 1


def test_a_model_of_the_hub_is_its_snapshot(
    tmp_path: Path, main: Callable[..., Said], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The cache's `main` moves to other weights. The cache is that of all tests (conftest.py)."""
    root = make(tmp_path / "project", "org/tiny", "svd")
    monkeypatch.chdir(root)
    cache = Path(HF_HUB_CACHE) / "models--org--tiny"
    request.addfinalizer(lambda: shutil.rmtree(cache))

    def at(commit: str) -> None:
        shutil.copytree(root / "model", cache / "snapshots" / commit)
        (cache / "refs").mkdir(exist_ok=True)
        (cache / "refs" / "main").write_text(commit)

    at("a" * 40)
    shutil.move(root / "model", tmp_path / "model")
    (tmp_path / "model").rename(root / "other")
    for words in (["run", "config.toml", "--out", "finished"], compare("svd")):
        assert main(*words).code == 0, words
    scaled(root / "other" / "weights" / "part-1.safetensors")
    (root / "other").rename(root / "model")
    at("b" * 40)
    (root / "model").rename(root / "other")
    calls = [
        ["run", "config.toml", "--out", "finished", "--resume"],
        ["run", "config.toml", "--out", "finished", "--resume", "--set", "run.rounds=3"],
    ]
    for words in calls:
        assert "weights/part-1.safetensors" in main(*words).error(), words
    said = main(*compare("svd, glora", "--resume"))
    assert said.code == 0 and "'org/tiny' had 2 different contents" in said.out
