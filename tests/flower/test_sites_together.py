"""Sites of a federation, each with its own file and model, in one process over Flower's wire.

Kinds of evidence: *parity* (the in-process engine on the same files is the reference, bit for bit), *contract* (a site
that lacks a class or has other columns trains as it should), *fault* (a site that does not agree is named, trains
nothing, and costs nobody else the round).
"""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

pytest.importorskip("flwr")

from safetensors.torch import load_file, save_file

from fedlora.flower.server.opening import opening
from fedlora.flower.site.trainer import keeping
from fedlora.flower.terms.facts import model_facts
from fedlora.runs.config import parse_config
from fedlora.runs.preparation import prepare
from fedlora.server.server import start
from fedlora.simulation import simulate
from support.federation_folders import RANKS, SETTINGS, FederationOnDisk, merged
from support.flower_grid import bits
from support.known_warnings import FUTURE_NAMES, LORA_BIAS
from support.training_data import LABELS, classification, rows

pytestmark = [FUTURE_NAMES, LORA_BIAS]


def federation(root: Path, **tables: Any) -> FederationOnDisk:
    return FederationOnDisk(root, **{"run": {"rounds": 1}, "evaluate": {"every": 9}, **tables})


def knowing(made: FederationOnDisk) -> FederationOnDisk:
    """The server knows the base model, as after `init` with one."""
    made.facts = model_facts(str(made.model), made.settings())
    return made


def rewrite(made: FederationOnDisk, name: str, **tables: Any) -> None:
    path = made.root / "sites" / name / "site.toml"
    path.write_text(tomli_w.dumps(merged(tomllib.loads(path.read_text()), tables)))


def state_of(made: FederationOnDisk) -> Any:
    return opening(made.home)[1].state.server


def test_sites_are_bit_for_bit_the_engine_on_the_same_files(tmp_path: Path) -> None:
    """One settings file, and a site.toml each, are the run whose data.clients are these files. A class is missing in
    one of them, and another has the column of the text by another name."""
    made = federation(tmp_path, run={"rounds": 2})
    lacking = [r for r in (json.loads(x) for x in rows(classification(60, 5)).splitlines()) if r["label"] != LABELS[-1]]
    assert 0 < len(lacking) < 60
    (tmp_path / "cork.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lacking))
    renamed = [json.loads(x) for x in (tmp_path / "acme.jsonl").read_text().splitlines()]
    own = "".join(json.dumps({"note": r["text"], "label": r["label"]}) + "\n" for r in renamed)
    (tmp_path / "own.jsonl").write_text(own)
    rewrite(made, "acme", data={"train": str(tmp_path / "own.jsonl"), "text": "note"})
    made.play()
    assert {len(line["losses"]) for line in made.lines()} == {3}

    tables = {k: v for k, v in SETTINGS.items() if k != "id"}
    config = parse_config({
        **tables,
        "run": {"rounds": 2, "threads": 1},
        "model": {**SETTINGS["model"], "name": str(made.model), "device": "cpu"},
        "data": {**SETTINGS["data"], "clients": {name: str(tmp_path / f"{name}.jsonl") for name in RANKS}},
        "clients": {"ranks": list(RANKS.values())},
    })  # fmt: skip
    run = prepare(config, keep=keeping(made.settings()))
    records = list(
        simulate(run.server, run.clients, run.trainer, start(run.server, run.seed_adapter), rounds=2, seed=0)
    )
    assert bits(state_of(made)) == bits(records[-1].state.server)


def one_byte(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    name = min(tensors)
    flat = tensors[name].contiguous().view(-1)
    flat[0] = flat[0] + 1e-3
    save_file(tensors, model / "model.safetensors", {"format": "pt"})


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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (one_byte, "base is"),
        (other_words, "tokenizer is"),
        (other_numbers, "config is"),
    ],
)
def test_a_site_with_another_model_is_named_and_costs_nobody_the_round(
    tmp_path: Path, change: Callable[[Path], None], said: str
) -> None:
    made = knowing(federation(tmp_path))
    other = tmp_path / "other"
    shutil.copytree(made.model, other)
    change(other)
    rewrite(made, "berlin", model={"name": str(other)})
    made.play()
    (line,) = made.lines()
    assert said in line["fates"]["berlin"]["why"] and set(line["losses"]) == {"acme", "cork"}, line["fates"]
    assert not list((tmp_path / "sites" / "berlin").rglob("round-*"))
