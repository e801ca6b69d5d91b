"""A site that trains by a program of its own. Kinds: *end to end* (sites in this process, Flower's wire format
between)."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import tomli_w

pytest.importorskip("flwr")

from fedlora.flower.places import SiteFolder
from support.federation_folders import FederationOnDisk
from support.known_warnings import FUTURE_NAMES, LORA_BIAS
from support.own_programs import DOUBLING, command

pytestmark = [FUTURE_NAMES, LORA_BIAS, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def with_program(fed: FederationOnDisk, name: str, text: str) -> SiteFolder:
    site = SiteFolder(fed.root / "sites" / name)
    (site.path / "program.py").write_text(text)
    said = tomllib.loads(site.site.read_text()) | {"train": {"command": [*command(site.path, text)[:2], "program.py"]}}
    site.site.write_text(tomli_w.dumps(said))
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
    card = (fed.home / "server" / "adapter" / "README.md").read_text()
    assert "program of a site's own" in card, "its settings say nothing of acme's training"
