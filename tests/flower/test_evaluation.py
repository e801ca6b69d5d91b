"""What a federation measures, chooses and leaves behind, over Flower's wire format with real tiny models. Kinds of
evidence: *parity* (the in-process engine of `fedlora run` measures the same numbers), *contract* (killed and resumed is
not killed; nothing is ignored in silence).
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

pytest.importorskip("flwr")

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from fedlora.errors import ConfigError
from fedlora.flower.server.federation import ending
from fedlora.flower.server.journal import read_now
from fedlora.flower.site.trainer import keeping
from fedlora.runs import preparation
from fedlora.runs.client_data import deal
from fedlora.runs.config import load_config
from support.federation_folders import RANKS, SETTINGS, FederationOnDisk, merged
from support.projects import ran
from support.training_data import LABELS, classification, rows


def without_times(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def adapters(fed: FederationOnDisk) -> dict[str, bytes]:
    """The written weights, byte for byte."""
    server = fed.home / "server"
    return {str(path.relative_to(server)): path.read_bytes() for path in sorted(server.rglob("adapter_model.*"))}


def test_sites_measure_what_fedlora_run_measures_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same files, model and rounds in one process, by another loop: the adapter, and each client's losses and score
    on its own, bit for bit. A class is missing at one site, and another has the column of the text by another name. The
    run is given the sites' way to hold rows out."""
    fed = FederationOnDisk(tmp_path)
    lacking = [row for row in rows(classification(60, 5)).splitlines() if json.loads(row)["label"] != LABELS[-1]]
    assert 0 < len(lacking) < 60
    (tmp_path / "cork.jsonl").write_text("\n".join(lacking))
    (tmp_path / "own.jsonl").write_text((tmp_path / "acme.jsonl").read_text().replace('"text":', '"note":'))
    site = tmp_path / "sites" / "acme" / "site.toml"
    its = merged(tomllib.loads(site.read_text()), {"data": {"train": str(tmp_path / "own.jsonl"), "text": "note"}})
    site.write_text(tomli_w.dumps(its))
    keep = keeping(fed.settings())
    monkeypatch.setattr(preparation, "deal", lambda config, root, _: deal(config, root, keep))
    summary = fed.play()
    tables: dict[str, Any] = {
        "model": {"name": str(fed.model), "dropout": 0.0}, "clients": {"ranks": list(RANKS.values())},
        "data": {"validation": 0.25, "test": 0.25, "max_length": 16,
                 "clients": {name: str(tmp_path / f"{name}.jsonl") for name in RANKS}},
        "train": SETTINGS["train"], "run": SETTINGS["run"], "evaluate": {"target": "clients", "clients_at_end": True},
    }  # fmt: skip
    (tmp_path / "run.toml").write_text(tomli_w.dumps(tables))
    folder = ran(load_config(tmp_path / "run.toml"), tmp_path / "run")
    for mine, theirs in zip(fed.lines(), folder.metrics(), strict=True):
        assert mine["losses"] == theirs["losses"] and mine["weights"] == theirs["weights"]
        for name in RANKS:
            assert mine["site_metrics"][name]["accuracy"] == theirs["metrics"][f"client/{name}"]
    at_end = folder.read_json("summary.json")["clients_at_end"]
    for name, scores in summary["site_test"]["sites"].items():
        assert {k: v for k, v in at_end[name].items() if "/" not in k} == {
            k: v for k, v in scores.items() if k != "examples"
        }
    places = (at / "adapter" / "adapter_model.safetensors" for at in (fed.home / "server", folder.path))
    mine, theirs = map(load_file, places)
    assert mine.keys() == theirs.keys() and all(torch.equal(theirs[name], tensor) for name, tensor in mine.items())
    assert summary["measured_by"] == "sites"
    assert summary["settings"] == fed.settings().agreed() and summary["test"] == {"last": {}, "best": {}}


def test_the_server_measures_chooses_and_leaves_adapters_that_load_anywhere(tmp_path: Path) -> None:
    """peft, example by example, gets the accuracy that the summary has; no file names a path of the server."""
    fed = FederationOnDisk(tmp_path)
    fed.write(data=fed.at_server())
    summary, lines = fed.play(), fed.lines()
    scores = [line["metrics"]["accuracy"] for line in lines]
    assert summary["measured_by"] == "server" and summary["best_round"] == 1 + scores.index(max(scores)) != 3
    assert summary["validation"]["best"] == lines[summary["best_round"] - 1]["metrics"]
    test = classification(40, 11)
    for place, want in (("adapter", summary["test"]["last"]), ("best", summary["test"]["best"])):
        folder = fed.home / "server" / place
        assert json.loads((folder / "labels.json").read_text())["num_labels"] == 3
        base = AutoModelForSequenceClassification.from_pretrained(fed.model, num_labels=3)
        model, words = PeftModel.from_pretrained(base, folder).eval(), AutoTokenizer.from_pretrained(folder)
        with torch.no_grad():
            said = [int(model(**words(text, return_tensors="pt")).logits.argmax()) for text in test.text]
        assert sum(a == b for a, b in zip(said, test.labels or (), strict=True)) / 40 == want["accuracy"]
        card = (folder / "README.md").read_text()
        assert f"accuracy {want['accuracy']:.4f}" in card and "| classes | blue, green, red |" in card
        assert "training examples | 180 over 3 clients" in card  # three times 60
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == "model"
    for path in (fed.home / "server").rglob("*"):
        if path.is_file() and path.name not in (".lock",):
            assert str(tmp_path).encode() not in path.read_bytes(), path


def test_it_stops_when_nothing_gets_better_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of next to nothing: no score moves, so two more than round 1 are looked at; the first of equals is best.
    Where what follows the last round fails, now.json does not say that it runs, and the next call does it."""

    def fails(lines: Any) -> Any:
        raise OSError("no space")

    fed = FederationOnDisk(
        tmp_path, train={"learning_rate": 1e-9, "max_steps": 1}, evaluate={"early_stopping_patience": 2},
        run={"rounds": 6},
    )  # fmt: skip
    with monkeypatch.context() as patched, pytest.raises(OSError, match="no space"):
        patched.setattr("fedlora.flower.server.finishing.over_rounds", fails)
        fed.play()
    assert read_now(fed.home / "server" / "now.json")["ended"] == {"kind": "failed", "why": "OSError: no space"}
    summary = fed.play()
    assert summary["stopped_early"]["round"] == summary["rounds"] == 3 and summary["best_round"] == 1
    assert read_now(fed.home / "server" / "now.json")["ended"]["kind"] == "stopped"
    caplog.set_level("INFO")
    grid = fed.grid()
    assert fed.play(grid) == summary and not grid.sent
    assert "after 3 rounds of 6" in ending(summary) and ending(summary) in caplog.text


def test_a_finished_federation_says_so_and_more_rounds_go_on_where_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two rounds and then one more are the three of a federation that was never finished."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    tables = {"run": {"rounds": 3}, "evaluate": {"every": 2}}
    whole, fed = (FederationOnDisk(tmp_path / name, **tables) for name in ("a", "b"))
    whole.play()
    assert ["site_mean" in line for line in whole.lines()] == [False, True, True]  # every second round, and the last
    fed.write(run={"rounds": 2})
    first = fed.play()
    caplog.set_level("INFO")
    grid = fed.grid()
    assert fed.play(grid) == first and not grid.sent
    assert "complete after 2 rounds" in caplog.text and "raise run.rounds" in caplog.text
    fed.write(run={"rounds": 3})
    assert fed.play()["rounds"] == 3
    assert without_times(fed.lines()) == without_times(whole.lines()) and adapters(fed) == adapters(whole)
    fed.write(run={"rounds": 4}, lora={"scaling": 3.0})
    before = adapters(fed)
    with pytest.raises(ConfigError, match=r"lora.scaling was 2.0 and is 3.0 .*3 rounds are played"):
        fed.play()
    assert adapters(fed) == before and len(fed.lines()) == 3


def test_a_tracker_is_told_every_round_once_more_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In stand-ins for trackers; what a real one gets: tests/runs/test_tracking.py."""
    made: list[tuple[bool, list[tuple[int, Any]]]] = []  # of each: anew, the rounds and their numbers; 0: closed

    def begun(name: str, called: Any, config: Any, folder: Any, anew: bool) -> tuple[Any, Any]:
        rounds = list[tuple[int, Any]]()
        made.append((anew, rounds))
        return lambda round, numbers: rounds.append((round, numbers)), lambda: rounds.append((0, None))

    def die(asked: Any, reply: Any) -> Any:
        if len(made[0][1]) == 2:
            raise KeyboardInterrupt
        return reply

    monkeypatch.setattr("fedlora.runs.tracking._begun", begun)
    monkeypatch.setattr("fedlora.flower.server.opening.check_trackers", lambda names: None)
    fed = FederationOnDisk(tmp_path, run={"rounds": 3, "report_to": ["tensorboard"]})
    grid = fed.grid()
    grid.meddle = {"acme": die}
    with pytest.raises(KeyboardInterrupt):
        fed.play(grid)
    fed.play()
    (anew, told), (anew_again, again) = made
    assert (anew, anew_again) == (False, True) and [n for n, _ in told] == [1, 2]
    assert again[:2] == told and again[2][0] == 3 and again[-1] == (0, None)
    line = fed.lines()[0]
    assert told[0][1]["loss/acme"] == line["losses"]["acme"]
    assert told[0][1]["site/acme/accuracy"] == line["site_metrics"]["acme"]["accuracy"]
