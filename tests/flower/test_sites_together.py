"""Sites of a federation, each with its own file and model, in one process over Flower's wire.

Kinds of evidence: *parity* (the in-process engine on the same files is the reference, bit for bit), *contract* (a site
that lacks a class or has other columns trains as it should), *fault* (a site that does not agree is named, trains
nothing, and costs nobody else the round).
"""

from __future__ import annotations

import json
import shutil
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w

pytest.importorskip("flwr")

from safetensors.torch import load_file, save_file

from fedlora.errors import ConfigError
from fedlora.flower.server.opening import opening
from fedlora.flower.site.trainer import keeping
from fedlora.flower.terms.facts import model_facts, write_agreed
from fedlora.flower.terms.settings import FederationSettings, Site
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
    facts = model_facts(str(made.model), made.settings())
    write_agreed(made.home / "agreement.json", facts)
    return made


def rewrite(made: FederationOnDisk, name: str, **tables: Any) -> None:
    path = made.root / "sites" / name / "site.toml"
    path.write_text(tomli_w.dumps(merged(tomllib.loads(path.read_text()), tables)))


def state_of(made: FederationOnDisk) -> Any:
    newest = opening(made.home).newest
    assert newest is not None
    return newest.state.server


def test_a_site_imports_no_module_of_the_server_s_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server names a class in a module that lies where the site stands: it is not imported, not even to be judged,
    until the site's operator names it in site.toml. Nor does a method of no sense run what it names."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "here")])
    ran = tmp_path / "ran"
    code = f"from pathlib import Path\nPath({str(ran)!r}).write_text('x')\n"
    (tmp_path / "here" / "theirs_only.py").write_text(f"{code}from fedlora.methods.glora import GLoRA as Theirs\n")
    made = federation(tmp_path / "fed", run={"rounds": 1})
    settings = made.settings()
    named = settings.model_copy(update={"method": settings.method.model_copy(update={"name": "theirs_only:Theirs"})})
    received = FederationSettings.from_travelling(named.travelling())
    site = Site.read(made.root / "sites" / "acme" / "site.toml")
    with pytest.raises(ConfigError, match=r"theirs_only:Theirs.*site\.toml"):
        received.for_site(site)
    assert "theirs_only" not in sys.modules and not ran.exists()
    config = received.for_site(replace(site, own={**site.own, "method": {"name": "theirs_only:Theirs"}}))
    assert config.method.build().name == "glora" and ran.read_text() == "x"


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
        (other_numbers, "config.layer_norm_eps is 1e-12"),
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


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"text": "w1 w2", "label": "nobody\'s"}\n' * 9, "LabelError"),
        (f'{{"sentence": "w1 w2", "label": "{LABELS[0]}"}}\n' * 9, "DataError"),
        (f'{{"text": "w1 w2", "label": "{LABELS[0]}"}}\n', "DataError"),
        ("", "DataError"),
    ],
    ids=["a class that nobody has", "no such column", "one example, and shares to hold out", "nothing"],
)
def test_a_site_whose_data_do_not_fit_is_named(tmp_path: Path, content: str, said: str) -> None:
    """At the server by the kind of the error alone; at the site in full, by `fedlora flower site` and `doctor`."""
    made = federation(tmp_path)
    (tmp_path / "cork.jsonl").write_text(content)
    made.play()
    (line,) = made.lines()
    assert said in line["fates"]["cork"]["why"] and set(line["losses"]) == {"acme", "berlin"}


def test_one_example_is_enough_where_nothing_is_held_out(tmp_path: Path) -> None:
    made = federation(tmp_path, data={"validation": 0.0, "test": 0.0}, evaluate={"every": 1})
    (tmp_path / "cork.jsonl").write_text(json.dumps({"text": "w1 w2", "label": LABELS[0]}) + "\n")
    made.play()
    assert set(made.lines()[0]["losses"]) == set(RANKS)
