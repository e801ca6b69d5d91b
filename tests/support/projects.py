"""A user's project on disk, runs of it, and how runs are looked at and compared."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft import PeftModel
from transformers import AutoModelForSequenceClassification

from fedlora.data import TextData, read_classification, split
from fedlora.runs.config import RunConfig, load_config
from fedlora.runs.execution import execute
from fedlora.runs.folder import RunFolder
from fedlora.runs.preparation import prepare
from fedlora.training.encode import encode
from support.command_line import drawing, invoke
from support.local_training import logits
from support.training_data import classification, rows, save_encoder, tokenizer

CONFIG = """
[model]
name = "model"
dropout = 0.0

[data]
train = "train.jsonl"
validation = 0.2
test = 0.2

[clients]
ranks = [2, 4, 4]
min_examples = 4

[train]
learning_rate = 2e-2
max_steps = 2
batch_size = 4

[run]
rounds = 3
threads = 1
"""
PRIVACY = """
[privacy]
clipping_norm = 1.0
noise_multiplier = 1.0
delta = 1e-3
population = "three toy sites"
ledger = "ledger.jsonl"
"""
FEDSA = ("method.name=fedsa-lora", "clients.ranks=[4]", "clients.count=3")


def make_project(folder: Path, layers: int = 1) -> Path:
    """What a user has: a model of so many layers, some text, a config."""
    save_encoder(folder / "model", layers)
    (folder / "train.jsonl").write_text(rows(classification(150, 0)))
    (folder / "config.toml").write_text(CONFIG)
    return folder


def make_private_project(folder: Path) -> Path:
    """The same, with [privacy] and named classes."""
    config = make_project(folder) / "config.toml"
    text = config.read_text().replace("[data]", '[data]\nlabel_names = ["blue", "green", "red"]')
    config.write_text(text + PRIVACY)
    return folder


def configured(project: Path, *overrides: str) -> RunConfig:
    return load_config(project / "config.toml", overrides)


def ran(config: RunConfig, path: Path, rounds: int | None = None, *, resume: bool = False) -> RunFolder:
    """The run without the command line and without plots; stopped after `rounds` more rounds, as a kill would."""
    folder = RunFolder(path)
    playing = execute(prepare(config), folder, resume=resume)
    for k, _ in enumerate(playing, start=1):
        if k == rounds:
            playing.close()  # type: ignore[attr-defined]
            break
    return folder


def contents(folder: Path) -> dict[str, tuple[str, int]]:
    """File -> digest and time of change."""
    return {
        str(path.relative_to(folder)): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def without_seconds(value: Any) -> Any:
    """JSON without wall times."""
    if isinstance(value, dict):
        return {key: without_seconds(item) for key, item in value.items() if key != "seconds"}
    return [without_seconds(item) for item in value] if isinstance(value, list) else value


def written(folder: RunFolder) -> dict[str, str]:
    """File -> digest of all adapters, byte for byte; of their cards all but the line that names the commit."""
    files = [path for name in ("adapter", "best", "clients") for path in sorted((folder.path / name).rglob("*.*"))]
    lines = {path: path.read_bytes().split(b"\n") for path in files}
    kept = {path: b"\n".join(line for line in lines[path] if not line.startswith(b"| code |")) for path in files}
    return {str(path.relative_to(folder.path)): hashlib.sha256(kept[path]).hexdigest() for path in files}


def same_run(one: RunFolder, other: RunFolder) -> None:
    """Metrics, summary and manifest alike but for seconds and commit (the working tree may change while tests run); the
    written adapters and the last states to the bit."""
    assert without_seconds(one.metrics()) == without_seconds(other.metrics())
    for name in ("summary.json", "manifest.json", "config.json"):
        mine, theirs = (without_seconds(folder.read_json(name)) | {"commit": None} for folder in (one, other))
        assert mine == theirs
    assert written(one) == written(other) != {}
    newest = [sorted(p.name for p in folder.checkpoints.glob("*.safetensors"))[-1] for folder in (one, other)]
    assert newest[0] == newest[1], "the name holds the digest"
    assert [p.name for p in one.best_checkpoint.iterdir()] == [p.name for p in other.best_checkpoint.iterdir()]


def held_out(config: RunConfig) -> tuple[TextData, TextData]:
    """The validation and test sets, cut here once more."""
    d = config.data
    data = read_classification(str(d.train), text=d.text, label=d.label)
    assert isinstance(d.validation, float) and isinstance(d.test, float)
    return split(data, validation=d.validation, test=d.test, seed=config.run.seed)[1:]


def accuracy(network: Any, data: TextData) -> float:
    """Example by example, unpadded, without the library's evaluation."""
    examples = encode(data, tokenizer(classifies=True), max_length=128)
    right = [int(logits(network, e["input_ids"]).argmax()) == e["labels"] for e in examples]
    return sum(right) / len(right)


def peft_model(project: Path, directory: Path) -> Any:
    base = AutoModelForSequenceClassification.from_pretrained(project / "model", num_labels=3)
    return PeftModel.from_pretrained(base, directory)


@dataclass(frozen=True)
class Finished:
    config: RunConfig
    folder: RunFolder
    out: str
    err: str


def finished_run(project: Path, out: Path) -> Finished:
    """`fedlora run config.toml --out ...`, GLoRA on ranks 2, 4, 4. The fixture `finished`."""
    sets = ["run.readouts=true", "evaluate.clients_at_end=true"]
    with drawing():
        result = invoke("run", project / "config.toml", "--out", out, *(a for s in sets for a in ("--set", s)))
    return Finished(configured(project, *sets), RunFolder(out), result.stdout, result.stderr)
