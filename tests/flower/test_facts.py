"""What all sides have alike: the same model in other files has the same facts. Kind: *contract*. Sites whose facts
differ: test_sites_together.py."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

from safetensors.torch import load_file, save_file

from fedlora import LoRA
from fedlora.flower.terms import facts
from fedlora.flower.terms.facts import model_facts, targets_of, versions_here
from fedlora.flower.terms.settings import FederationSettings
from support.known_warnings import FUTURE_NAMES, LORA_BIAS
from support.tiny_models import bert
from support.training_data import save_model

pytestmark = [FUTURE_NAMES, LORA_BIAS]


def test_patch_releases_and_new_minor_torches_work_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "__version__", "0.1.9")
    monkeypatch.setattr(facts, "installed", lambda name: "2.13.1+cpu" if name == "torch" else None)
    found = versions_here()
    assert (found["fedlora"], found["torch"]) == ("0.1", "2") and "peft" not in found


def test_a_model_is_known_by_its_content_and_not_by_its_files(tmp_path: Path) -> None:
    """Another layout and order of the same tensors is the same model; one number more is another."""
    here = save_model(tmp_path / "base", bert(), classifies=True)
    there = Path(shutil.copytree(here, tmp_path / "copy"))
    tensors = load_file(there / "model.safetensors")
    save_file(dict(reversed(tensors.items())), there / "model.safetensors", {"format": "pt", "by": "me"})
    settings = FederationSettings(id="f", data={"label_names": ["0", "1"]})  # type: ignore[arg-type]
    mine = model_facts(str(here), settings)
    assert model_facts(str(there), settings) == mine
    name = min(tensors)
    save_file(tensors | {name: tensors[name] + 1e-3}, there / "model.safetensors", {"format": "pt"})
    assert model_facts(str(there), settings)["base"] != mine["base"]


def test_targets_are_modules_and_shapes_whatever_the_rank() -> None:
    def of(rank: int, d_in: int) -> str:
        return targets_of({"q": LoRA(torch.zeros(8, rank), torch.zeros(rank, d_in))})

    assert of(2, 6) == of(4, 6) != of(2, 5)
