"""A robust rule in a federation on Flower: settings, lines, fates, what is refused. Kinds of evidence: contract, parity
(the round is that of `Server.aggregate` on the same uploads)."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedlora.server.robust_rules import GeometricMedian, Krum, Mixing, MultiKrum

from fedlora import Server, build
from fedlora.errors import ConfigError, QuorumNotMet
from fedlora.flower.terms.policy import Policy
from fedlora.flower.terms.settings import FederationSettings
from fedlora.flower.terms.site_file import Site
from support.flower_grid import changed, federation, nan

SAID = 'id = "f"\n[data]\nlabels = ["no", "yes"]\n[lora]\ntargets = ["q"]\n'
FIVE = dict.fromkeys("abcde", 4)


def test_a_rule_is_of_the_servers_settings_and_travels(tmp_path: Path) -> None:
    path = tmp_path / "federation.toml"
    path.write_text(SAID + '[defence]\nrule = "multi-krum"\nliars = 2\nmixing = true\n')
    settings = FederationSettings.load(path)
    assert settings.defence.build() == Mixing(MultiKrum(2), 2)
    assert FederationSettings.from_travelling(settings.travelling()).defence == settings.defence
    assert settings.for_site(Site(name="a", data="a.csv", model="m")).defence.build() is None  # it weighs nobody
    path.write_text(settings.toml())
    assert FederationSettings.load(path) == settings
    path.write_text(SAID + '[defence]\nrule = "multi-krum"\nliars = 2\ntau = 1.0\n')
    with pytest.raises(ConfigError, match=r"defence\.tau = 1\.0 has no effect"):
        FederationSettings.load(path)


def test_rounds_say_what_the_rule_did(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In rounds.jsonl and in the log; a client that is left out has trained and is not refused."""
    caplog.set_level(logging.INFO, logger="fedlora")
    strategy, grid = federation(tmp_path, Server(build("glora"), rule=Krum(liars=1)), FIVE, record=tmp_path / "record")
    strategy.start(grid, num_rounds=2)
    lines = [json.loads(line) for line in (tmp_path / "record" / "rounds.jsonl").read_text().splitlines()]
    for line in lines:
        clients = line["defence"]["clients"]
        assert set(clients) == set(FIVE) and line["defence"]["rule"] == "krum (liars = 1)"
        assert [one["after"] for one in clients.values()].count(0.0) == 4
        assert {said["fate"] for said in line["fates"].values()} == {"trained"}
    told = [receipt.why for receipt in strategy.flower_state.receipts.values() if receipt.why]
    assert len(told) == 4 and all("no weight" in why and "nearest is" in why for why in told)
    assert "round 1: krum leaves out" in caplog.text and "nearest is" in caplog.text


def test_too_few_clients_are_refused_before_and_in_a_round(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"krum with 2 liars .* 5 clients needs 7"):
        federation(tmp_path, Server(build("glora"), rule=Krum(liars=2)), FIVE)
    strategy, grid = federation(tmp_path, Server(build("glora"), rule=Krum(liars=1)), FIVE)
    grid.offline = {"b"}
    with pytest.raises(QuorumNotMet, match=r"krum .*1 liar among 4 clients .* 5"):
        strategy.start(grid, num_rounds=1)
    assert strategy.round == 0


@pytest.mark.parametrize("rubbish", [changed(loss=-1.0), nan], ids=["loss", "nan"])
def test_a_site_refused_for_what_it_sent_is_one_of_the_liars(tmp_path: Path, rubbish: Any) -> None:
    """One of 2 f + 3 cannot end the rounds: Krum for one liar needs 5 clients, for none 3. An absent one is no liar
    (above), and two refused are more than f, of whom nobody knows how many are left."""
    policy = Policy(FIVE, retries=0)
    strategy, grid = federation(tmp_path, Server(build("glora"), rule=Krum(liars=1), quorum=2), FIVE, policy=policy)
    grid.meddle = {"c": rubbish}
    for done in (1, 2):
        strategy.start(grid, num_rounds=done)
        tally = strategy.flower_state.state.server.tally
        assert tally is not None and tally.judged is not None
        assert list(tally.refused) == ["c"] and set(tally.weights) == set("abde")
        assert tally.judged.rule == "krum (liars = 0)"
    two, grid = federation(tmp_path / "two", Server(build("glora"), rule=Krum(liars=1), quorum=2), FIVE)
    grid.meddle = {"c": rubbish, "d": rubbish}
    with pytest.raises(QuorumNotMet, match=r"krum with 1 liar among 3 .* \(refused .*: c: .*; d: ") as failed:
        two.start(grid, num_rounds=1)
    assert str(failed.value).count("c: ") == 1 and "Not there" not in str(failed.value)


def test_half_of_the_weight_is_refused_at_the_start_and_more_than_a_third_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By examples one of five can claim all of the weight; uniform by default, where it has a fifth, and two of five
    have more than a third."""
    rule = GeometricMedian(liars=1)
    with pytest.raises(ConfigError, match="can hold 100%"):
        federation(tmp_path, Server(build("glora"), rule=rule, weighting="examples"), FIVE)
    federation(tmp_path, Server(build("glora"), rule=rule), FIVE)
    assert not caplog.text
    federation(tmp_path, Server(build("glora"), rule=GeometricMedian(liars=2)), FIVE)
    assert "2 of 5 clients can hold 40%" in caplog.text
