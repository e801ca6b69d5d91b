"""What all sides have alike. Kinds of evidence: *contract* (the same model in other files has the same digest),
*attack* (each fact alone is changed, and the difference is named with both sides), *teaching errors*."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from safetensors.torch import load_file, save_file

from fedlora.errors import ConfigError
from fedlora.flower.terms.agreement import (
    PROTOCOL,
    Disagreement,
    Facts,
    check,
    differences,
    versions_apart,
    versions_here,
)  # fmt: skip
from fedlora.flower.terms.facts import admitted, agreed, model_facts, of_model, server_facts, targets_of, write_agreed
from fedlora.flower.terms.settings import FederationSettings
from fedlora.flower.terms.site_file import Site
from fedlora.runs.preparation import prepare
from fedlora.training.digests import base_digest, template_digest, tokenizer_digest
from fedlora.training.load import tokenizer_of
from support.known_warnings import FUTURE_NAMES, LORA_BIAS
from support.tiny_models import bert
from support.training_data import save_model

pytestmark = [FUTURE_NAMES, LORA_BIAS]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save_model(tmp_path_factory.mktemp("m") / "base", bert(), classifies=True))


def copy(model: Path, to: Path) -> Path:
    return Path(shutil.copytree(model, to))


def settings(**data: Any) -> FederationSettings:
    return FederationSettings(id="f", data={"labels": ["0", "1", "2"], "max_length": 16, **data})  # type: ignore[arg-type]


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_shards_and_one_file_are_the_same_model(model: Path, tmp_path: Path) -> None:
    """Another layout, another order, other metadata: the digest is of the tensors."""
    tensors = load_file(model / "model.safetensors")
    there = copy(model, tmp_path / "shards")
    (there / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({n: tensors[n] for n in reversed(part)}, there / file, {"format": "pt", "by": file})
    index = {"weight_map": {n: file for file, part in halves.items() for n in part}}
    (there / "model.safetensors.index.json").write_text(json.dumps(index))
    assert base_digest(there) == base_digest(model)
    (there / "model-2.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"lacks model-2\.safetensors"):
        base_digest(there)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t | {min(t): t[min(t)] + 1e-3},
        lambda t: {n: v.half() for n, v in t.items()},
        lambda t: {f"x.{n}": v for n, v in t.items()},
        lambda t: dict(list(t.items())[1:]),
        lambda t: {n: v.reshape(1, *v.shape) for n, v in t.items()},
    ],
    ids=["values", "precision", "names", "fewer", "shape"],
)  # fmt: skip
def test_another_model_has_another_digest(model: Path, tmp_path: Path, change: Callable[[Any], Any]) -> None:
    there = copy(model, tmp_path / "other")
    save_file(change(load_file(there / "model.safetensors")), there / "model.safetensors")
    assert base_digest(there) != base_digest(model)


def test_files_that_are_no_weights_are_told(model: Path, tmp_path: Path) -> None:
    there = copy(model, tmp_path / "cut")
    file = there / "model.safetensors"
    whole = file.read_bytes()
    for broken in (whole[:-5], b"", b"\xff" * 100, whole[:40]):
        file.write_bytes(broken)
        with pytest.raises(ConfigError, match=r"model\.safetensors"):
            base_digest(there)
    file.unlink()
    with pytest.raises(ConfigError, match="has no weights"):
        base_digest(there)


# ---- tokenizers ------------------------------------------------------------------------------------------------------


def test_the_layout_of_a_tokenizers_files_does_not_count(model: Path, tmp_path: Path) -> None:
    there = copy(model, tmp_path / "t")
    file = there / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()), indent=7, sort_keys=True))
    assert tokenizer_digest(tokenizer_of(there)) == tokenizer_digest(tokenizer_of(model))
    again = tokenizer_of(model)
    again.save_pretrained(tmp_path / "again")
    shutil.copy(model / "config.json", tmp_path / "again")
    assert tokenizer_digest(tokenizer_of(tmp_path / "again")) == tokenizer_digest(again)


def test_another_vocabulary_is_another_tokenizer(model: Path, tmp_path: Path) -> None:
    there = copy(model, tmp_path / "t")
    file = there / "tokenizer.json"
    raw = json.loads(file.read_text())
    words = raw["model"]["vocab"]
    a, b = [w for w in words if w.startswith("w")][:2]
    words[a], words[b] = words[b], words[a]
    file.write_text(json.dumps(raw))
    assert tokenizer_digest(tokenizer_of(there)) != tokenizer_digest(tokenizer_of(model))


# ---- facts and differences -------------------------------------------------------------------------------------------

SERVER = Facts(
    base="b" * 64, tokenizer="7" * 64, template="c" * 64, labels=("no", "yes"), scaling=2.0, max_length=128,
    targets=("a.q 8x8", "a.v 8x8"), architecture={"rope_theta": 1e4}, versions=versions_here(),
)  # fmt: skip
OTHERS: dict[str, tuple[Any, list[str]]] = {
    "base": ("d" * 64, ["bbbbbbbbbbbb", "dddddddddddd", "`model` in site.toml"]),
    "tokenizer": ("d" * 64, ["777777777777", "dddddddddddd", "tokenizer.json"]),
    "template": ("d" * 64, ["cccccccccccc", "dddddddddddd", "data.template"]),
    "labels": (("yes", "no"), ["['no', 'yes']", "['yes', 'no']", "data.labels"]),
    "scaling": (1.0, ["is 2", "has 1:", "lora.scaling"]),
    "max_length": (64, ["128", "64", "data.max_length"]),
    "targets": (("a.q 8x8", "a.v 8x9"), ["'a.v 8x8'", "'a.v 8x9'", "lora.targets"]),
    "architecture": ({"rope_theta": 5e5}, ["10000.0 at the server", "500000.0 at", "config.json"]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_each_fact_alone_is_told_with_both_sides(name: str) -> None:
    from dataclasses import replace

    other, words = OTHERS[name]
    site = replace(SERVER, **{name: other})
    said = differences(SERVER, site, "acme")
    assert len(said) == 1 and all(word in said[0] for word in [*words, "server", "acme"]), said
    with pytest.raises(Disagreement, match="server"):
        check(SERVER, site, "acme")
    assert differences(SERVER, SERVER) == []
    assert differences(replace(SERVER, **{name: type(other)()}), site) == []  # what the server does not know


def test_every_fact_is_compared() -> None:
    """A new field of Facts cannot be forgotten."""
    assert set(OTHERS) | {"versions"} == set(Facts.__dataclass_fields__)


def test_who_says_nothing_has_not_agreed() -> None:
    assert "its base, tokenizer, labels" in differences(SERVER, Facts(), "acme", whole=True)[0]
    assert differences(SERVER, Facts(), "acme") == []


def test_facts_come_back_from_their_text_and_forged_ones_do_not() -> None:
    assert Facts.from_text(SERVER.text()) == SERVER
    assert Facts.from_text(Facts().text()) == Facts()
    assert Facts.from_table({"base": "a" * 64, "of a later version": 1}) == Facts(base="a" * 64)
    for name in ("base", "tokenizer", "template"):
        for odd in ("x", "b" * 63, "b" * 65, "B" * 64, "b" * 64 + "\n", "\x1b[2J" + "b" * 60, "\u0660" * 64):
            with pytest.raises(Disagreement, match=f"facts cannot be read: {name} = ") as raised:
                Facts.from_text(json.dumps({name: odd}))
            assert str(raised.value).isprintable()
    forged = ("{", "[]", "[" * 100_000, '{"base": 1}', '{"labels": "no"}', '{"labels": [1]}', '{"scaling": true}')
    for text in (
        *forged,
        '{"max_length": 1e999}',
        '{"versions": {"a": {}}}',
        '{"architecture": []}',
        '{"scaling": NaN}',
    ):
        with pytest.raises(Disagreement, match="the other side's facts"):
            Facts.from_text(text)


V = {"protocol": PROTOCOL, "fedlora": "0.1.0", "torch": "2.12.0+cpu", "transformers": "5.23.0", "peft": "0.21.2"}


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, ""),
        ({"fedlora": "0.1.7"}, ""),
        ({"torch": "2.13.1"}, ""),
        ({"torch": "3.0.0"}, r"torch is 2\.12\.0.*3\.0\.0 at acme.*pip install 'torch==2\.12\.\*'"),
        ({"transformers": "4.57.1"}, r"transformers is 5\.23\.0.*4\.57\.1"),
        ({"fedlora": "0.2.0"}, r"fedlora is 0\.1\.0.*0\.2\.0.*pip install 'fedlora==0\.1\.\*'"),
        ({"fedlora": "0.10.0"}, r"fedlora is 0\.1\.0.*0\.10\.0"),
        ({"fedlora": "1.1.0"}, r"fedlora is 0\.1\.0.*1\.1\.0"),
        ({"protocol": "fedlora/2"}, r"fedlora/5' and acme 'fedlora/2': install one version"),
        (
            {"torch": "9" * 5000},
            r"torch is 2\.12\.0",
        ),  # more digits than Python's int takes: it was a traceback of `admit`
        ({"torch": None}, ""),
    ],
)
def test_which_versions_may_meet(changes: dict[str, str | None], refused: str) -> None:
    other = {k: v for k, v in {**V, **changes}.items() if v is not None}
    wrong = versions_apart(V, other, "acme")
    assert bool(wrong) == bool(refused) and (not refused or re.search(refused, wrong[0])), wrong
    if refused:
        with pytest.raises(Disagreement):
            check(Facts(versions=V), Facts(versions=other), "acme")
    else:
        check(Facts(versions=V), Facts(versions=other), "acme")


def test_a_loaded_trainer_and_the_files_say_the_same(model: Path, tmp_path: Path) -> None:
    """What `fedlora flower site` computes without a model holds of the model that trains: only the targets are new."""
    (tmp_path / "d.csv").write_text("text,label\n" + "".join(f"w{k} w{k + 1},{k % 2}\n" for k in range(20)))
    site = Site(name="a", data=str(tmp_path / "d.csv"), model=str(model))
    files, loaded = model_facts(site.model, settings()), prepare(settings().for_site(site))
    assert tokenizer_digest(loaded.model.tokenizer) == files.tokenizer
    assert {part.label_names for part in loaded.parts.values()} == {files.labels}
    assert (loaded.model.settings.unit, loaded.config.data.max_length) == (files.scaling, files.max_length)
    trained = replace(files, targets=targets_of(loaded.seed_adapter.modules))
    check(server_facts(settings(), of_model(files), loaded.seed_adapter.modules), trained, "a")
    assert trained.targets and not files.targets
    assert files.architecture["hidden_size"] == 32 and "transformers_version" not in files.architecture


def test_the_first_site_tells_a_server_that_has_no_model(model: Path, tmp_path: Path) -> None:
    """It is written down; the next ones are compared with it."""
    first = model_facts(str(model), settings())
    known, new = admitted(settings(), agreed(tmp_path / "agreement.json"), "acme", first)
    assert new == ("base", "tokenizer", "architecture")
    write_agreed(tmp_path / "agreement.json", known)
    again = agreed(tmp_path / "agreement.json")
    assert again == known and admitted(settings(), again, "cork", first) == (again, ())
    there = copy(model, tmp_path / "other")
    save_file({n: t + 1 for n, t in load_file(there / "model.safetensors").items()}, there / "model.safetensors")
    with pytest.raises(Disagreement, match=r"base model has .*cork has"):
        admitted(settings(), again, "cork", model_facts(str(there), settings()))
    (tmp_path / "agreement.json").write_text("{")
    with pytest.raises(ConfigError, match=r"agreement\.json cannot be read.* admit the sites again"):
        agreed(tmp_path / "agreement.json")


def test_the_chat_template_counts_where_it_is_used(model: Path) -> None:
    tokenizer = tokenizer_of(model)
    assert template_digest(tokenizer) == ""
    tokenizer.chat_template = "{{ messages }}"
    assert template_digest(tokenizer) != ""


@pytest.mark.parametrize("fact", ["base", "tokenizer", "labels", "scaling", "max_length", "protocol", "fedlora"])
def test_a_request_that_leaves_a_fact_out_is_not_admitted(model: Path, fact: str) -> None:
    """What was not said is not taken as agreed, whether it is absent or empty, and whoever knows it at the server."""
    table = model_facts(str(model), settings()).table()
    known = of_model(Facts.from_table(table))
    table["versions"] = dict(table["versions"])
    there = table["versions"] if fact in table["versions"] else table
    for empty in (type(there[fact])(), None):
        if empty is None:
            del there[fact]
        else:
            there[fact] = empty
        for there_known in (known, Facts()):
            with pytest.raises(Disagreement, match=rf"does not say its .*{fact.replace('_', ' ')}"):
                admitted(settings(), there_known, "acme", Facts.from_table(table))
