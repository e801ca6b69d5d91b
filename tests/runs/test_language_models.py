"""Runs of a language model: its template in manifest and digest, what was cut, its answers before and after.

Kinds of evidence: *end-to-end* (a tiny Llama, no network), *oracle* (answers of a plain model with the written
adapter's update in its weights), *contract* (what contradicts itself is one line).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fedlora.adapters.io import read_adapter
from fedlora.errors import CheckpointError, ConfigError
from fedlora.runs.client_data import deal
from fedlora.runs.folder import RunFolder
from fedlora.runs.preparation import prepare
from support.local_training import dense, logits
from support.projects import configured, ran
from support.tiny_models import llama
from support.training_data import EOS, instructions, save_model, tokenizer, word

CHAT = "{% for m in messages %}{{ m.content }} [EOS] {% endfor %}"
CONFIG = """
[model]
name = "model"
task = "causal-lm"
[data]
train = "train.jsonl"
max_length = 12
validation = 0.2
test = 0.2
[lora]
target_modules = ["q_proj", "v_proj"]
[clients]
count = 2
ranks = [2, 4]
partition = "iid"
[run]
rounds = 2
threads = 1
[train]
learning_rate = 1e-2
max_steps = 3
batch_size = 6
[evaluate]
max_new_tokens = 4
samples = 3
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("language")
    save_model(folder / "model", llama(), classifies=False)
    talking = tokenizer(classifies=False)
    talking.chat_template = CHAT
    talking.save_pretrained(folder / "model")
    data = instructions(40, 0)
    assert data.responses is not None
    rows = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in zip(data.text, data.responses, strict=True)
    ]
    rows[0]["messages"][0]["content"] = " ".join(["w1"] * 20)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.toml").write_text(CONFIG)
    return folder


@pytest.fixture(scope="module")
def done(place: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return ran(configured(place), tmp_path_factory.mktemp("done") / "run")


def test_without_classes_the_examples_are_dealt_out_evenly_and_a_skew_is_refused(place: Path) -> None:
    sizes = [len(part) for part in deal(configured(place, "clients.partition=dirichlet"), None).parts.values()]
    assert max(sizes) - min(sizes) <= 1
    with pytest.raises(ConfigError, match="needs labels"):
        deal(configured(place, "clients.partition=dirichlet", "clients.dirichlet_alpha=1.0"), None)


def test_a_run_is_not_resumed_with_other_prompts(place: Path, done: RunFolder, tmp_path: Path) -> None:
    folder = shutil.copytree(done.path, tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"data\.chat_template"):
        ran(configured(place, "data.chat_template={prompt}"), folder, resume=True)


def test_what_was_cut_is_in_the_manifest(place: Path, done: RunFolder) -> None:
    """Of all examples one is too long: 20 words, an end, and an answer with its end, in 12 places."""
    manifest = done.read_json("manifest.json")
    assert manifest["data"]["chat_template"].startswith("chat, sha256 ")
    parts = prepare(configured(place)).parts
    ((holder, k),) = [(c, k) for c, part in parts.items() for k, t in enumerate(part.text) if len(t.split()) == 20]
    answer = (parts[holder].responses or ())[k]
    tokens = 20 + 1 + len(answer.split()) + 1 - 12
    assert manifest["cut"] == {holder: {"examples": len(parts[holder]), "cut": 1, "tokens": tokens, "responses": 0}}


def samples(folder: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder.path / "samples.jsonl").read_text().splitlines()]


def test_answers_before_and_after(place: Path, done: RunFolder) -> None:
    """Token by token from the logits of a plain model: of the pre-trained one, and with the written adapter's
    update in its weights; up to 4 tokens or the end."""
    adapter, _ = read_adapter(done.path / "adapter")
    networks = {
        "before": dense(place / "model", llama, {}, {}),
        "after": dense(place / "model", llama, {n: x.delta() for n, x in adapter.modules.items()}, {}),
    }
    rows = samples(done)
    assert len(rows) == 3
    for row in rows:
        for name, network in networks.items():
            ids = [*(word(int(w[1:])) for w in row["prompt"].split()), EOS]
            made: list[int] = []
            while len(made) < 4 and (token := int(logits(network, ids + made)[-1].argmax())) != EOS:
                made.append(token)
            assert row[name] == tokenizer(classifies=False).decode(made, skip_special_tokens=True), name
    assert any(row["before"] != row["after"] for row in rows)


def test_without_a_server_model_a_client_answers_and_leaves_half_of_the_positions(place: Path, tmp_path: Path) -> None:
    sets = ("run.rounds=1", "method.name=fedsa-lora", "clients.ranks=[2]", "evaluate.max_new_tokens=9999")
    rows = samples(ran(configured(place, *sets), tmp_path / "run"))
    assert {row["of"] for row in rows} == {"the model of site-1"}
    assert all(row["prompt"] for row in rows) and min(row["cut"] for row in rows) == 0
