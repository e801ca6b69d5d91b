"""What all sides have alike: the same model in other files has the same facts. Kind: *contract*. Sites whose facts
differ: *fault*, over Flower's wire with real tiny models."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import pytest
import tomli_w
import torch

pytest.importorskip("flwr")

from safetensors.torch import load_file, save_file

from fedlora import LoRA
from fedlora.flower.terms import facts
from fedlora.flower.terms.facts import model_facts, targets_of, versions_here
from fedlora.flower.terms.settings import FederationSettings
from support.federation_folders import FederationOnDisk, merged
from support.tiny_models import bert
from support.training_data import save_model


def test_patch_releases_and_new_minor_torches_work_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "__version__", "0.1.9")
    monkeypatch.setattr(facts, "installed", lambda name: "2.13.1+cpu" if name == "torch" else None)
    found = versions_here()
    assert (found["fedlora"], found["torch"]) == ("0.1", "2") and "peft" not in found


def other_weight(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    name = min(tensors)
    save_file(tensors | {name: tensors[name] + 1e-3}, model / "model.safetensors", {"format": "pt"})


def other_words(model: Path) -> None:
    path = model / "tokenizer.json"
    raw = json.loads(path.read_text())
    vocabulary = raw["model"]["vocab"]
    a, b = [word for word in vocabulary if word.startswith("w")][:2]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    path.write_text(json.dumps(raw))


def other_numbers(model: Path) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "layer_norm_eps": 0.1}))


def test_a_model_is_known_by_its_content_and_not_by_its_files(tmp_path: Path) -> None:
    """Another layout and order of the same tensors is the same model; another number or word is another."""
    here = save_model(tmp_path / "base", bert(), classifies=True)
    there = Path(shutil.copytree(here, tmp_path / "copy"))
    tensors = load_file(there / "model.safetensors")
    save_file(dict(reversed(tensors.items())), there / "model.safetensors", {"format": "pt", "by": "me"})
    settings = FederationSettings(id="f", data={"label_names": ["0", "1"]})  # type: ignore[arg-type]
    mine = model_facts(str(here), settings)
    assert model_facts(str(there), settings) == mine
    for change, fact in ((other_weight, "base"), (other_words, "tokenizer"), (other_numbers, "config")):
        change(there)
        found = model_facts(str(there), settings)
        assert [key for key in mine if found[key] != mine[key]] == [fact]
        shutil.copytree(here, there, dirs_exist_ok=True)


def test_targets_are_modules_and_shapes_whatever_the_rank() -> None:
    def of(rank: int, d_in: int) -> str:
        return targets_of({"q": LoRA(torch.zeros(8, rank), torch.zeros(rank, d_in))})

    assert of(2, 6) == of(4, 6) != of(2, 5)


def test_a_site_with_another_model_is_named_and_costs_nobody_the_round(tmp_path: Path) -> None:
    made = FederationOnDisk(tmp_path, run={"rounds": 1}, evaluate={"every": 9})
    made.facts = model_facts(str(made.model), made.settings())
    other = tmp_path / "other"
    shutil.copytree(made.model, other)
    other_numbers(other)
    path = tmp_path / "sites" / "berlin" / "site.toml"
    path.write_text(tomli_w.dumps(merged(tomllib.loads(path.read_text()), {"model": {"name": str(other)}})))
    made.play()
    (line,) = made.lines()
    assert "config is" in line["fates"]["berlin"]["why"] and set(line["losses"]) == {"acme", "cork"}, line["fates"]
    assert not list((tmp_path / "sites" / "berlin").rglob("round-*"))
