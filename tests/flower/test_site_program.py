"""A site that trains by a program of its own. Kinds: *end to end* (sites in this process, Flower's wire format
between), *contract* (no server can name a program).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedlora.errors import ConfigError
from fedlora.flower.places import SiteFolder
from fedlora.flower.site.site_work import told_to_server
from fedlora.flower.terms.settings import FederationSettings
from fedlora.flower.terms.settings_from_run import from_run
from fedlora.flower.terms.site_file import Site
from fedlora.training.round_folder import ProgramFailed
from support.command_line import Said
from support.federation_folders import FederationOnDisk
from support.known_warnings import FUTURE_NAMES, LORA_BIAS
from support.own_programs import DOUBLING, command

pytestmark = [FUTURE_NAMES, LORA_BIAS, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def with_program(fed: FederationOnDisk, name: str, text: str, **more: Any) -> SiteFolder:
    site = SiteFolder(fed.root / "sites" / name)
    (site.path / "program.py").write_text(text)
    said = Site.read(site.site).model_copy(update={"command": [*command(site.path, text)[:2], "program.py"], **more})
    site.site.write_text(said.toml())
    return site


def test_a_site_trains_by_its_program_beside_sites_that_do_not(tmp_path: Path) -> None:
    """acme's program runs where its site may write, says its own loss."""
    fed = FederationOnDisk(tmp_path, run={"rounds": 2})
    text = DOUBLING + "\npathlib.Path('mine').write_text('')"
    site = with_program(fed, "acme", text)
    fed.play()
    losses = [line["losses"]["acme"] for line in fed.lines()]
    assert losses == [1.0, 0.5]
    place = site.state / "programs" / "acme"
    assert (place / "program.log").read_text() == "done acme\n"
    assert (place / "mine").exists()
    assert place.stat().st_mode & 0o777 == 0o700


def test_a_program_that_fails_costs_its_site_a_round_and_nothing_else(tmp_path: Path) -> None:
    """The round counts without it; in the next one it goes on. The server is told the kind of the error alone, since a
    program's last words may hold its data."""
    fed = FederationOnDisk(tmp_path, run={"rounds": 2}, server={"quorum": 2})
    site = with_program(fed, "acme", DOUBLING + "\nif said['round'] == 1: raise SystemExit('patient 17 is odd')")
    fed.play()
    first, second = fed.lines()
    assert "acme" not in first["losses"] and second["losses"]["acme"] == 0.5
    assert "ProgramFailed" in first["fates"]["acme"]["why"]
    failed = ProgramFailed("the program of 'acme' ended with code 1. Its last line: 'patient 17 is odd'")
    assert "patient" not in told_to_server(failed, site.path)


def test_no_server_can_name_a_program() -> None:
    """Settings that travel have no such key, so a server cannot make a site run anything; a run's file says so."""
    good = json.loads(FederationSettings(id="fed-1", data={"labels": ["no", "yes"]}).travelling())
    assert not {"command", "time_limit"} & set(good["train"])
    for key, value in (("command", ["rm", "-r", "/"]), ("time_limit", 5.0)):
        bad = json.dumps({**good, "train": {**good["train"], key: value}})
        with pytest.raises(ConfigError, match=rf"train\.{key}"):
            FederationSettings.from_travelling(bad)
    raw = {"data": {"labels": ["no", "yes"]}, "train": {"command": ["python", "mine.py"]}}
    with pytest.raises(ConfigError, match=r"train.command = .* site.toml"):
        from_run(raw)


def test_a_site_file_with_a_program(tmp_path: Path) -> None:
    """Its files are found beside it; the server's [train] has no effect there."""
    (tmp_path / "mine.py").write_text("")
    site = Site(name="acme", data="d.csv", model="m", command=["python", "mine.py", "{data}"], time_limit=60.0)
    (tmp_path / "site.toml").write_text(site.toml())
    read = Site.read(tmp_path / "site.toml")
    assert read.command == ["python", str(tmp_path / "mine.py"), "{data}"]
    settings = FederationSettings(id="fed-1", data={"labels": ["no", "yes"]}, train={"lr": 1e-4, "steps": 3})
    train = settings.for_site(read).train
    assert (train.command, train.time_limit, train.steps) == (read.command, 60.0, 10)


def test_a_trial_gives_each_site_the_program_of_the_run(tmp_path: Path, main: Callable[..., Said]) -> None:
    from support.training_data import classification, rows, save_encoder

    save_encoder(tmp_path / "model")
    for k, name in enumerate(("acme", "berlin")):
        (tmp_path / f"{name}.jsonl").write_text(rows(classification(24, k)))
    words = json.dumps(command(tmp_path, DOUBLING, "{data}"))
    (tmp_path / "run.toml").write_text(
        '[model]\npath = "model"\ndevice = "cpu"\n[data]\nclients = { acme = "acme.jsonl", berlin = "berlin.jsonl" }\n'
        f'max_length = 16\n[clients]\nranks = 2\n[lora]\ntargets = ["query"]\n[train]\ncommand = {words}\n'
        "time_limit = 60.0\n"
    )
    said = main("flower", "init", tmp_path / "trial", "--config", tmp_path / "run.toml")
    assert said.code == 0, said.err
    for name in ("acme", "berlin"):
        site = Site.read(tmp_path / "trial" / "sites" / name / "site.toml")
        assert site.command == json.loads(words) and site.time_limit == 60.0
    assert "command" not in (tmp_path / "trial" / "federation.toml").read_text()
