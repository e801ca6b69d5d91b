"""`fedlora flower up`'s folder: a run's data dealt to sites, and a site that trains by a program of its own. Kind:
*contract*, with real files and a real tiny model. The processes: test_deployment.py."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedlora.errors import ConfigError
from fedlora.flower.grid import BoundedGrid
from fedlora.flower.places import FederationFolder
from fedlora.flower.server.federation import play
from fedlora.flower.server.journal import read_rounds
from fedlora.flower.server.status import keys_of
from fedlora.flower.server.up import make
from fedlora.flower.site.checks import checked_site
from fedlora.flower.terms.policy import Policy
from fedlora.flower.terms.settings import FederationSettings
from fedlora.flower.terms.site_file import Site
from fedlora.runs.client_data import deal
from fedlora.runs.config import RunConfig, load_config
from support.federation_folders import SiteNode
from support.flower_grid import FastClock, LocalGrid
from support.own_programs import DOUBLING, command
from support.training_data import classification, rows, save_encoder

RUN = """\
[model]
name = "model"
device = "cpu"
[lora]
target_modules = ["query"]
[run]
rounds = 2
threads = 1
"""


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], RunConfig]:
    save_encoder(tmp_path / "model")
    for k, name in enumerate(("acme", "berlin")):
        (tmp_path / f"{name}.jsonl").write_text(rows(classification(40, k)))

    def write(text: str) -> RunConfig:
        (tmp_path / "run.toml").write_text(RUN + text)
        return load_config(tmp_path / "run.toml")

    return write


def test_one_file_is_dealt_as_the_run_deals_it(tmp_path: Path, written: Callable[[str], RunConfig]) -> None:
    """Each site has exactly its share, the server what is held out, and every check of a site passes."""
    config = written('[data]\ntrain = "acme.jsonl"\nmax_length = 16\n[clients]\nranks = [2, 4]\npartition = "iid"\n')
    make(tmp_path / "fed", config, 18080)
    fed, dealt = FederationFolder(tmp_path / "fed"), deal(config, None)
    for name, part in dealt.parts.items():
        lines = [json.loads(line) for line in (fed.site(name).path / "data.jsonl").read_text().splitlines()]
        assert Counter(line["text"] for line in lines) == Counter(part.text)
        assert all(sound for _, _, sound in checked_site(fed.site(name).path, server=False))
    settings = FederationSettings.load(fed.settings)
    held = [json.loads(line)["text"] for line in Path(settings.files()["validation"]).read_text().splitlines()]
    assert held == list(dealt.validation[""].text) and settings.share("validation") == 0.0
    assert dict(Policy.read(fed.policy).clients) == {"site-1": 2, "site-2": 4}
    assert set(keys_of(fed)) == {"site-1", "site-2"} and settings.network.port == settings.network.superlink_port


def test_files_of_their_own_and_a_program_stay_the_sites(tmp_path: Path, written: Callable[[str], RunConfig]) -> None:
    """Nothing of them is in what travels. The program trains where its site may write, and says its own loss."""
    words = json.dumps(command(tmp_path, DOUBLING + "\npathlib.Path('mine').write_text('')", "{data}"))
    config = written(
        '[data]\nclients = { acme = "acme.jsonl", berlin = "berlin.jsonl" }\nmax_length = 16\n'
        f"[clients]\nranks = 2\n[train]\ncommand = {words}\ntimeout = 60.0\n"
    )
    make(tmp_path / "fed", config, 18080)
    fed = FederationFolder(tmp_path / "fed")
    for name in ("acme", "berlin"):
        site = Site.read(fed.site(name).site)
        assert site.data == str(tmp_path / f"{name}.jsonl")
        assert site.own["train"] == {"command": json.loads(words), "timeout": 60.0}
    raw = tomllib.loads(fed.settings.read_text())
    assert "clients" not in raw["data"] and "command" not in raw.get("train", {})
    nodes: dict[str, Any] = {name: SiteNode(fed.site(name).site) for name in ("acme", "berlin")}
    play(BoundedGrid(LocalGrid(nodes), clock=FastClock()), fed.path)
    assert [line["losses"] for line in read_rounds(fed.rounds)] == [dict.fromkeys(nodes, loss) for loss in (1.0, 0.5)]
    place = fed.site("acme").state / "programs" / "acme"
    assert (place / "program.log").read_text() == "done acme\n" and (place / "mine").exists()
    assert place.stat().st_mode & 0o777 == 0o700
    assert "program of a site's own" in (fed.adapter / "README.md").read_text(), "its settings say nothing of that"


def test_what_only_a_run_can_do_is_refused(tmp_path: Path, written: Callable[[str], RunConfig]) -> None:
    config = written(
        '[data]\ntrain = "acme.jsonl"\n[clients]\ncount = 4\n[attack]\nkind = "sign-flip"\nfraction = 0.25\n'
    )
    with pytest.raises(ConfigError, match="attack"):
        make(tmp_path / "fed", config, 18080)
    assert not (tmp_path / "fed").exists()
