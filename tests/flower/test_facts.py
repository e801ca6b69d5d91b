"""What all sides have alike. Kinds of evidence: *contract* (the same model in other files has the same facts), *attack*
(each fact alone is changed, and the difference is named with both sides)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from safetensors.torch import load_file, save_file

from fedlora import LoRA
from fedlora.flower.terms.facts import Disagreement, Facts, check, differences, model_facts, server_facts, targets_of
from fedlora.flower.terms.settings import FederationSettings
from support.known_warnings import FUTURE_NAMES, LORA_BIAS
from support.tiny_models import bert
from support.training_data import save_model

pytestmark = [FUTURE_NAMES, LORA_BIAS]
SERVER = Facts({
    "base": "a" * 64, "tokenizer": "b" * 64, "labels": '["no", "yes"]', "scaling": 2.0, "max_length": 128,
    "targets": "2 modules, 0123456789abcdef", "config.hidden_size": 384, "protocol": "fedlora/6", "fedlora": "0.1.4",
    "torch": "2.12.0",
})  # fmt: skip


def settings(**data: Any) -> FederationSettings:
    return FederationSettings(id="f", data={"label_names": ["0", "1"], "max_length": 16, **data})  # type: ignore[arg-type]


@pytest.mark.parametrize("fact", [fact for fact in SERVER.values if fact != "torch"])
def test_each_difference_alone_is_named_with_both_sides(fact: str) -> None:
    other: Any = "9.9.9" if fact == "fedlora" else "c" * 64 if isinstance(SERVER.values[fact], str) else 7
    with pytest.raises(Disagreement) as error:
        check(SERVER, SERVER.and_these(**{fact: other}), "acme")
    assert fact in str(error.value) and str(other)[:12] in str(error.value) and "acme" in str(error.value)


def test_patch_releases_and_new_minor_torches_work_together() -> None:
    assert differences(SERVER, SERVER.and_these(fedlora="0.1.9", torch="2.13.1+cpu"), whole=True) == []
    assert len(differences(SERVER, SERVER.and_these(torch="3.0.0"))) == 1


def test_who_trains_must_say_all_and_who_joins_what_it_knows() -> None:
    check(SERVER, Facts(), whole=False)
    with pytest.raises(Disagreement, match="base"):
        check(SERVER, Facts(), whole=True)


@pytest.mark.parametrize("text", ["{", "[1]", '{"base": []}', '{"base": null}', "[" * 100_000])
def test_what_is_no_table_of_values_is_refused(text: str) -> None:
    with pytest.raises(Disagreement):
        Facts.from_text(text)
    with pytest.raises(Disagreement):
        Facts.of({str(k): 1 for k in range(3000)})
    assert Facts.from_text(SERVER.text()) == SERVER


def test_a_model_is_known_by_its_content_and_not_by_its_files(tmp_path: Path) -> None:
    """Another layout and order of the same tensors is the same model; one number more is another."""
    here = save_model(tmp_path / "base", bert(), classifies=True)
    there = Path(shutil.copytree(here, tmp_path / "copy"))
    tensors = load_file(there / "model.safetensors")
    save_file(dict(reversed(tensors.items())), there / "model.safetensors", {"format": "pt", "by": "me"})
    mine = model_facts(str(here), settings())
    assert model_facts(str(there), settings()) == mine and mine.values["config.hidden_size"]
    name = min(tensors)
    save_file(tensors | {name: tensors[name] + 1e-3}, there / "model.safetensors", {"format": "pt"})
    assert model_facts(str(there), settings()).base != mine.base
    assert json.loads(str(mine.values["labels"])) == ["0", "1"] and mine.values["max_length"] == 16


def test_targets_are_modules_and_shapes_whatever_the_rank() -> None:
    def of(rank: int, d_in: int) -> str:
        return targets_of({"q": LoRA(torch.zeros(8, rank), torch.zeros(rank, d_in))})

    assert of(2, 6) == of(4, 6) != of(2, 5)
    assert "targets" not in server_facts(settings(), Facts()).values
