"""federation.toml is a run's file, and site.toml lies over it. Kinds of evidence: *contract*, *attack* (what a server
sends). Expected values by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedlora.errors import ConfigError
from fedlora.flower.terms.settings import FederationSettings
from fedlora.flower.terms.site_file import Site
from fedlora.runs.reading import checked

TABLES: dict[str, Any] = {
    "id": "fed-1", "model": {"name": "demo", "dtype": "float32"}, "data": {"label_names": ["no", "yes"]},
    "lora": {"target_modules": ["query"]}, "train": {"learning_rate": 0.5, "max_steps": 3},
    "run": {"rounds": 6, "threads": 1},
}  # fmt: skip
OWN: dict[str, Any] = {"data": {"train": "notes.csv"}, "model": {"name": "/models/bert"}}


def of(folder: Path = Path("/fed"), **tables: Any) -> FederationSettings:
    return FederationSettings.of({**TABLES, **tables}, folder)


def test_what_a_site_gets_is_all_but_what_is_the_servers(tmp_path: Path) -> None:
    """The server's model, files, address and ledger stay; a site's settings are otherwise the same."""
    here = of(data={"label_names": ["no", "yes"], "validation": "held.csv"}, network={"name": "fl.example.org"})
    agreed = here.agreed()
    assert not any(word in str(agreed) for word in ("/fed", "held.csv", "fl.example.org", "demo"))
    there = FederationSettings.model_validate(agreed)
    assert there.agreed() == agreed and there.run == here.run and there.data.label_names == ["no", "yes"]
    assert here.files() == {"validation": "/fed/held.csv"}
    assert here.share("validation") == there.data.validation == 0.0
    assert here.share("test") == there.data.test == 0.1  # a share is each site's
    measured = here.for_server()
    assert measured is not None and (measured.data.validation, measured.data.test) == ("/fed/held.csv", 0.0)
    assert measured.model.name == "demo" and of().for_server() is None


def test_no_server_sets_what_is_a_sites_own() -> None:
    """Whatever it sends: the site's trainer has the paths, the program and the device of site.toml alone."""
    said = of().agreed()
    said["train"] |= {"command": ["rm", "-r", "/"], "timeout": 1.0}
    said["model"] |= {"name": "/etc", "adapter": "/etc/adapter", "device": "cuda", "revision": "main"}
    said["data"] |= {"clients": {"a": "/etc"}, "train": None, "validation": "/etc/passwd"}
    said |= {"clients": {"ranks": [9]}, "attack": {"kind": "sign-flip", "fraction": 0.5}, "network": {"port": 1}}
    config = FederationSettings.model_validate(said).for_site(Site("acme", OWN), rank=4)
    assert (config.train.command, config.train.timeout) == (None, None)
    assert (config.model.name, config.model.adapter, config.model.device) == ("/models/bert", None, "auto")
    assert (config.data.clients, config.data.train, config.data.validation) == ({"acme": "notes.csv"}, None, 0.0)
    assert (config.model.revision, config.clients.ranks, config.attack.kind) == (None, [4], "none")


def test_a_module_of_a_servers_choice_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies where the site stands, and is refused before it is judged."""
    (tmp_path / "theirs_only.py").write_text("raise SystemExit('it ran')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"theirs_only:Theirs.* runs it"):
        checked(FederationSettings, of().agreed() | {"method": {"name": "theirs_only:Theirs"}})
    assert "theirs_only" not in sys.modules


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"data": {"train": "x.csv"}}, "data.train .*site.toml"),
        ({"clients": {"ranks": [4]}}, "policy.toml"),
        ({"train": {"command": ["x"]}}, "train.command .*site.toml"),
        ({"data": {}}, "data.label_names is missing"),
        ({"run": {"workers": 4}}, "run.workers is no setting .*fedlora run"),
        ({"evaluate": {"target": "server"}}, "evaluate.target .*data.validation"),
        ({"train": {"learnig": 1}}, "unknown key"),
        ({"id": "a/b"}, "id"),
    ],
)
def test_what_a_federation_does_not_have_is_said(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        of(**tables)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"data": {"train": "a", "label_names": ["x", "y"]}}, "data.label_names"),
        ({"train": {"learning_rate": 1.0}}, "train.learning_rate"),
        ({"server": {"quorum": 1}}, "server.quorum"),
        ({"colour": "red"}, "colour"),
        ({"data": {}}, r"\[data\] train is missing"),
        ({"name": "../up"}, "the name of a site"),
    ],
)
def test_a_site_sets_its_own_keys_alone(raw: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Site.of({"name": "acme", **OWN, **raw}, Path("/site"))


def test_a_mistake_in_a_sites_value_names_its_file() -> None:
    with pytest.raises(ConfigError, match=r"site.toml of acme.*run\.threads"):
        of().for_site(Site("acme", {**OWN, "run": {"threads": -1}}))
