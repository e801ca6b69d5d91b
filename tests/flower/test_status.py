"""What is said of a federation's state. Kind: *unit*. Expected values by hand."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import typer

pytest.importorskip("flwr")

from fedlora.cli.flower.serve import Stop, tell_end
from fedlora.flower.places import FederationFolder
from fedlora.flower.processes import locked
from fedlora.flower.server.journal import Journal, round_line
from fedlora.flower.server.status import headline, standing, status_of
from fedlora.flower.server.superlink import NodeFacts
from support.played_folders import federation_folder, play_round


def loopback(home: Path) -> None:
    """At a port where nobody is."""
    with (home / "federation.toml").open("a") as file:
        file.write("[network]\nsuperlink_port = 1\n")


def test_status_without_a_superlink(tmp_path: Path, main: Any) -> None:
    """From files alone; as JSON and as tables."""
    home = federation_folder(tmp_path / "f")
    loopback(home)
    play_round(home, 1, {"cork": "refused"})
    (home / "keys" / "berlin.pub").unlink()
    found = json.loads(main("flower", "status", home, "--json").out)
    assert (found["round"], found["rounds"], found["finished"], found["served_by"]) == (1, 3, None, None)
    assert found["superlink"] is False and found["sites"]["berlin"]["node"] == "no key"
    assert found["sites"]["acme"] == {
        "rank": 8, "node": "unknown", "fate": "trained", "why": "", "loss": 1.0,
        "weight": 0.5, "score": 0.75, "fates": {"trained": 1},
    }  # fmt: skip
    assert json.loads(main("flower", "status", home, "--json", "--rounds", 0).out)["last_rounds"] == []
    with locked(home / "state" / "serve.lock", "serves it"):
        said = main("flower", "status", home)
    assert said.code == 0 and "served by process" in said.out and "1 of 3 rounds done" in said.out
    assert "round 1: cork: refused: so" in said.out
    assert "its accuracy" in said.out and "accuracy 0.750 at the sites" in said.out
    assert main("flower", "status", tmp_path).error()


def test_status_names_who_has_not_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = federation_folder(tmp_path / "f")
    told = Journal(home / "server")
    told.asked(1, "train", ["acme", "berlin"])
    told.answered("acme")
    node = NodeFacts("acme", 1, "online", b"")
    monkeypatch.setattr("fedlora.flower.server.status._nodes", lambda folder: {"acme": node})
    with locked(home / "state" / "serve.lock", "serves it"):
        found = status_of(FederationFolder(home))
    assert "round 1 of 3 goes on" in headline(found) and "no answer yet: berlin" in headline(found)
    assert found["sites"]["acme"]["node"] == "online" and found["sites"]["berlin"]["node"] == "unknown"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, None)])
def test_ctrl_c_before_the_last_round_is_an_exit_code_of_its_own(number: int, code: int | None, tmp_path: Path) -> None:
    """As of every other command. SIGTERM is how systemd stops a service that is well."""
    place, stop, ended = federation_folder(tmp_path / "f"), Stop(), None
    stop.by_signal(number, None)
    assert stop.is_set()
    try:
        tell_end(place, standing(FederationFolder(place)), stop, "serve f")
    except typer.Exit as exit:
        ended = exit.exit_code
    assert ended == code


def test_a_rounds_line_never_understates_epsilon() -> None:
    """13.60302 to three digits is 13.603, which is less."""
    privacy = {"epsilon": 13.60302, "epsilon_planned": 25.1000001}
    assert "epsilon 13.604 of 25.101 " in round_line({"round": 1, "loss": 0.5, "fates": {}, "privacy": privacy})
