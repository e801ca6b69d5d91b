"""A robust rule in a federation on Flower: settings, lines, fates, what is refused. Kinds of evidence: contract, parity
(the round is that of `Server.aggregate` on the same uploads)."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedlora import Server, build
from fedlora.errors import ConfigError, QuorumNotMet
from fedlora.flower.terms.settings import FederationSettings, Site
from fedlora.server.kept import Kept
from fedlora.server.rules import NNM, Krum, MultiKrum
from support.flower_grid import federation, play

SAID = 'id = "f"\n[data]\nlabel_names = ["no", "yes"]\n[lora]\ntarget_modules = ["q"]\n'
FIVE = dict.fromkeys("abcde", 4)


def test_a_rule_is_of_the_servers_settings_and_travels(tmp_path: Path) -> None:
    path = tmp_path / "federation.toml"
    path.write_text(SAID + '[robust]\nrule = "multi-krum"\nbyzantine = 2\nnnm = true\n')
    settings = FederationSettings.load(path)
    assert settings.robust.build() == NNM(MultiKrum(2), 2)
    assert FederationSettings.from_travelling(settings.travelling()).robust == settings.robust
    assert (
        settings.for_site(Site("a", {"data": {"train": "a.csv"}, "model": {"name": "m"}})).robust.build() is None
    )  # it weighs nobody
    path.write_text(SAID + '[robust]\nrule = "multi-krum"\nbyzantine = 2\ntau = 1.0\n')
    with pytest.raises(ConfigError, match=r"robust\.tau is for centered-clipping"):
        FederationSettings.load(path)


def test_rounds_say_what_the_rule_did(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In rounds.jsonl and in the log; a client that is left out has trained and is not refused."""
    caplog.set_level(logging.INFO, logger="fedlora")
    strategy, grid = federation(tmp_path, Server(build("glora"), round=Kept(Krum(1))), FIVE)
    play(strategy, grid, 2)
    for line in strategy.journal.lines():
        clients = line["robust"]["clients"]
        assert set(clients) == set(FIVE) and line["robust"]["rule"] == "krum (f = 1)"
        assert [one["coefficient"] for one in clients.values()].count(0.0) == 4
        assert {said["fate"] for said in line["fates"].values()} == {"trained"}
    told = [receipt.why for receipt in strategy.kept.receipts.values() if receipt.why]
    assert len(told) == 4 and all("no weight" in why and " away from " in why for why in told)
    assert "round 1: krum left out" in caplog.text


def test_too_few_clients_are_refused_before_and_in_a_round(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"krum \(f = 2\) needs 7 clients, but a round has 5"):
        play(*federation(tmp_path, Server(build("glora"), round=Kept(Krum(2))), FIVE), 1)
    strategy, grid = federation(tmp_path, Server(build("glora"), round=Kept(Krum(1))), FIVE)
    grid.offline = {"b"}
    with pytest.raises(QuorumNotMet, match=r"krum \(f = 1\) needs 5 clients, and 4 came"):
        play(strategy, grid, 1)
    assert strategy.round == 0
