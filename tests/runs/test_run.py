"""Whole runs from a config file: the run folder, the best round, kinds of runs. Tiny transformers, no network.

Kinds of evidence: *end-to-end* (real transformers and peft, the command line in this process), *oracle* (logits of the
written adapters against peft and against a plain model with the dense update in its weights), *contract* (what is in
the folder).
"""

from __future__ import annotations

import gc
import hashlib
import json
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedlora.training.loop
from fedlora import METHODS, build
from fedlora.adapters.io import read_adapter
from fedlora.runs.execution import execute
from fedlora.runs.folder import RunFolder
from fedlora.runs.identity import digest_of
from fedlora.runs.preparation import prepare
from support.command_line import Said, invoke, options
from support.projects import (
    FEDSA,
    Finished,
    accuracy,
    configured,
    contents,
    held_out,
    make_project,
    peft_model,
    ran,
)
from support.training_data import LABELS, classification, rows


def test_a_process_that_has_made_a_run_holds_nothing_of_it(project: Path, tmp_path: Path) -> None:
    """Nothing keeps the model: 30 runs in one process would add up."""
    prepared = prepare(configured(project, "run.rounds=1"))
    model = weakref.ref(prepared.model)
    assert [record.round for record in execute(prepared, RunFolder(tmp_path / "run"))] == [1]
    del prepared
    gc.collect()
    assert model() is None


# ---- one run, looked at from all sides -------------------------------------------------------------------------------


def test_a_run_folder_holds_what_it_says_and_nothing_else(finished: Finished) -> None:
    folder = finished.folder
    assert {path.name for path in folder.path.iterdir()} == {
        "config.json", "manifest.json", "metrics.jsonl", "summary.json",
        "adapter", "best", "clients", "plots", "checkpoints",
    }  # fmt: skip
    assert folder.read_json("config.json") == json.loads(finished.config.canonical())
    files = {"README.md", "adapter_config.json", "adapter_model.safetensors", "labels.json"}
    files |= {"tokenizer.json", "tokenizer_config.json"}
    adapters = [folder.path / "adapter", folder.path / "best", *sorted((folder.path / "clients").iterdir())]
    assert [path.name for path in adapters] == ["adapter", "best", "site-1", "site-2", "site-3"]
    assert all({f.name for f in path.iterdir()} == files for path in adapters)
    rounds = sorted(p.name.split(".")[0] for p in folder.checkpoints.glob("*.safetensors"))
    assert rounds == ["round-00002", "round-00003"], "keep_checkpoints = 2"
    for name in ("metric.png", "spectrum.png"):
        assert (folder.plots / name).stat().st_size > 5000
        assert str(folder.plots / name) in finished.err


def test_manifest_json_says_what_ran_on_what(finished: Finished, project: Path) -> None:
    manifest = finished.folder.read_json("manifest.json")
    assert manifest["config_digest"] == digest_of(finished.config)
    assert manifest["clients"] == {"site-1": 2, "site-2": 4, "site-3": 4}
    assert manifest["method"] == repr(build("glora"))
    assert manifest["evaluation_target"] == "server"
    assert (manifest["device"], manifest["threads"], manifest["seed"]) == ("cpu", 1, 0)
    assert torch.__version__.startswith(manifest["versions"]["torch"]) and all(manifest["versions"].values())
    weights = hashlib.sha256((project / "model" / "model.safetensors").read_bytes()).hexdigest()
    assert manifest["model"]["sha256"]["model.safetensors"] == weights
    data = manifest["data"]
    validation, test = held_out(finished.config)
    assert data["validation"] == {"examples": len(validation), "sha256": validation.digest()}
    assert data["test"] == {"examples": len(test), "sha256": test.digest()}
    assert sum(part["examples"] for part in data["train"].values()) + len(validation) + len(test) == 150
    counts = {client: sum(row) for client, row in data["label_counts"].items()}
    assert counts == {client: part["examples"] for client, part in data["train"].items()}
    assert data["label_names"] == list(LABELS)


def test_metrics_summary_and_card_agree(finished: Finished) -> None:
    """A line for each round, bytes by the shapes of tiny_models.bert: query and value, 32 x 32, and a head of 3 labels.
    The gauge check is on the last round."""
    s, lines = finished.folder.read_json("summary.json"), finished.folder.metrics()
    assert [line["round"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert set(line["losses"]) == set(line["weights"]) == {"site-1", "site-2", "site-3"}
        assert sum(line["weights"].values()) == pytest.approx(1) and line["refused"] == {}
        assert set(line["metrics"]) == {"accuracy", "macro_f1", "loss"}
        assert line["bytes"]["total"] == sum(v for k, v in line["bytes"].items() if k != "total")
    assert lines[0]["bytes"]["up_adapter"] == (2 + 4 + 4) * 2 * (32 + 32) * 4
    assert lines[0]["bytes"]["up_heads"] == 3 * (3 * 32 + 3) * 4
    assert [line["gauge_drift"] is None for line in lines] == [True, True, False]
    assert lines[-1]["gauge_drift"]["glora"] < 1e-9 < 1e-3 < lines[-1]["gauge_drift"]["padded-average"]
    best = max(lines, key=lambda line: line["metrics"]["accuracy"])
    assert (s["method"], s["rounds"], s["clients"], s["target"]) == ("glora", 3, 3, "server")
    assert s["validation"] == {"last": lines[-1]["metrics"], "best": best["metrics"]}
    assert s["best_round"] == best["round"] and s["refused"] == 0
    assert s["bytes"] == {k: sum(line["bytes"][k] for line in lines) for k in lines[0]["bytes"]}
    for name in ("server_rank", "padded_error", "gauge_drift"):
        assert s[name] == lines[-1][name]
    card = (finished.folder.path / "adapter" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: peft\n") and f"digest {digest_of(finished.config)}" in card
    assert "| rounds | 3 of 3 planned, seed 0 |" in card and "| dealt out by | partition dirichlet |" in card
    assert "(glora, round 3)" in card and "site-1: 2, site-2: 4, site-3: 4" in card
    assert f"accuracy {s['test']['last']['accuracy']:.4f}" in card
    assert f"(glora, round {s['best_round']})" in (finished.folder.path / "best" / "README.md").read_text()


def test_peft_counts_the_scores_that_were_reported(finished: Finished, project: Path) -> None:
    """The server's model, and each client's readout at its own rank."""
    validation, test = held_out(finished.config)
    s = finished.folder.read_json("summary.json")
    model = peft_model(project, finished.folder.path / "adapter").eval()
    assert accuracy(model, test) == pytest.approx(s["test"]["last"]["accuracy"])
    assert accuracy(model, validation) == pytest.approx(s["validation"]["last"]["accuracy"])
    assert accuracy(model, test) > 0.4, "it learnt something"
    for client, rank in {"site-1": 2, "site-2": 4, "site-3": 4}.items():
        directory = finished.folder.path / "clients" / client
        adapter, spec = read_adapter(directory, scaling=2.0)
        assert set(adapter.ranks.values()) == {rank} and spec.scaling == 2.0
        assert accuracy(peft_model(project, directory), test) == pytest.approx(s["clients_at_end"][client]["accuracy"])


def test_a_second_run_without_resume_is_refused_and_touches_nothing(
    finished: Finished, project: Path, main: Callable[..., Said]
) -> None:
    before = contents(finished.folder.path)
    said = main("run", project / "config.toml", "--out", finished.folder.path)
    assert "already holds a run; add --resume" in said.complaint()
    assert contents(finished.folder.path) == before


# ---- best, by validation ---------------------------------------------------------------------------------------------


def test_the_best_round_is_chosen_on_validation_only(tmp_path: Path) -> None:
    """Validation asks for a wrong class, test for the right one: the more is learnt, the worse validation looks, so it
    prefers an early round where test would take a late one. peft counts."""
    project, right = make_project(tmp_path), classification(60, 77)
    assert right.labels is not None
    wrong = replace(right, labels=tuple((y + 1) % 3 for y in right.labels))
    (project / "wrong.jsonl").write_text(rows(wrong))
    (project / "right.jsonl").write_text(rows(right))
    sets = ("data.validation=wrong.jsonl", "data.test=right.jsonl", "run.rounds=4", "train.max_steps=8")
    folder = ran(configured(project, *sets), tmp_path / "run")
    by_validation, s = [line["metrics"]["accuracy"] for line in folder.metrics()], folder.read_json("summary.json")
    best, test = 1 + by_validation.index(max(by_validation)), s["test"]
    assert best < 4 and test["best"]["accuracy"] < test["last"]["accuracy"], "the case is as constructed"
    assert s["best_round"] == best
    assert [p.name[:11] for p in folder.best_checkpoint.iterdir()] == [f"round-{best:05d}"]
    assert accuracy(peft_model(project, folder.path / "best"), right) == pytest.approx(test["best"]["accuracy"])


def test_of_equal_rounds_the_first_is_best_and_no_validation_means_no_best(project: Path, tmp_path: Path) -> None:
    """A learning rate of nearly zero changes no answer, so all rounds are alike; the best one's state is then lost."""
    folder = ran(configured(project, "train.learning_rate=1e-12", "run.rounds=2"), tmp_path / "flat")
    assert folder.read_json("summary.json")["best_round"] == 1
    shutil.rmtree(folder.best_checkpoint)
    ran(configured(project, "train.learning_rate=1e-12", "run.rounds=2", "run.readouts=true"), folder.path, resume=True)
    assert folder.finished() and not (folder.path / "best").exists()

    folder = ran(configured(project, "data.validation=0", "run.rounds=1"), tmp_path / "none")
    s = folder.read_json("summary.json")
    assert s["best_round"] is None and s["validation"] == {"last": {}, "best": {}} and s["test"]["best"] == {}
    assert s["test"]["last"]["accuracy"] > 0
    assert not (folder.path / "best").exists() and (folder.path / "adapter").exists()


# ---- other kinds of runs ---------------------------------------------------------------------------------------------


def test_a_method_without_server_model_leaves_its_clients_models(project: Path, tmp_path: Path) -> None:
    """FedSA-LoRA: no adapter/ and no best/, but one directory for each client, which peft loads."""
    config = configured(project, *FEDSA, "evaluate.clients_at_end=true", "run.participation=0.67", "run.rounds=2")
    folder = ran(config, tmp_path / "run")
    s = folder.read_json("summary.json")
    assert s["target"] == folder.read_json("manifest.json")["evaluation_target"] == "clients"
    assert {p.name for p in folder.path.iterdir() if p.is_dir()} == {"clients", "checkpoints"}
    assert s["padded_error"] is None and s["gauge_drift"] is None
    names = ["site-1", "site-2", "site-3"]
    assert sorted(path.name for path in (folder.path / "clients").iterdir()) == names
    _, test = held_out(config)
    for name in names:
        got = accuracy(peft_model(project, folder.path / "clients" / name), test)
        assert got == pytest.approx(s["clients_at_end"][name]["accuracy"]) == s["test"]["last"][f"client/{name}"]
    each = [s["test"]["last"][f"client/{name}"] for name in names]
    assert s["test"]["last"]["accuracy"] == pytest.approx(sum(each) / 3)
    assert s["test"]["last"]["worst"] == min(each)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_runs_from_a_config(project: Path, tmp_path: Path, method: str) -> None:
    """One rank for all, which every method serves; two thirds of the clients; uploads as the config says."""
    config = configured(
        project, f"method.name={method}", "clients.ranks=[4]", "clients.count=3", "run.rounds=2", "evaluate.every=2",
        "run.participation=0.67", "train.max_steps=2",
    )  # fmt: skip
    folder = ran(config, tmp_path / "run")
    first, second = folder.metrics()
    assert first["metrics"] == {} and second["metrics"] != {}
    assert len(first["losses"]) == len(second["losses"]) == 2
    s = folder.read_json("summary.json")
    assert s["method"] == method and s["best_round"] == 2


def test_a_diverged_client_is_left_out_and_said(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawn: None
) -> None:
    """With a quorum the run goes on; the log has null for its loss, for JSON has no NaN, and the pictures are drawn."""
    train = fedlora.training.loop.LocalTrainer.train

    def diverging(self: Any, download: Any, adapter: Any, position: int) -> Any:
        trained = train(self, download, adapter, position)
        if download.client.id != "site-2":
            return trained
        return replace(trained, adapter=trained.adapter.map(lambda t: t * float("nan")), loss=float("nan"))

    monkeypatch.setattr(fedlora.training.loop.LocalTrainer, "train", diverging)
    sets = options(("server.quorum=2", "run.rounds=2", "run.keep_uploads=last"))
    result = invoke("run", project / "config.toml", "--out", tmp_path / "run", *sets)
    folder = RunFolder(tmp_path / "run")
    for line in folder.metrics():
        assert line["losses"]["site-2"] is None and "NaN" in line["refused"]["site-2"]
        assert set(line["weights"]) == {"site-1", "site-3"}
    assert folder.read_json("summary.json")["refused"] == 2
    kept = sorted(str(path.relative_to(folder.path)) for path in folder.path.glob("uploads/*/*"))
    assert kept == ["uploads/round-00002/site-1", "uploads/round-00002/site-3"], "the last round, without the refused"
    assert "round 1: site-2 left out: " in result.stderr
    assert (folder.plots / "metric.png").exists()
