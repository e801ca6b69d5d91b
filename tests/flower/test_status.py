"""What is said of a federation: lines, status. Kind: *unit*. Expected values by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedlora.errors import ConfigError
from fedlora.flower.places import FederationFolder
from fedlora.flower.processes import serving
from fedlora.flower.server.finishing import taken_part
from fedlora.flower.server.journal import Journal, beside, round_line, rounds_done, scores_line
from fedlora.flower.serving.standing import standing
from fedlora.flower.serving.status import headline, status_of
from fedlora.flower.serving.superlink import NodeFacts
from fedlora.flower.serving.telling import nodes_line
from fedlora.flower.terms.policy import Policy
from support.fake_link import end_rounds, federation_folder, play_round


def line(**fates: str) -> dict[str, Any]:
    losses = {name: 0.5 for name, fate in fates.items() if fate == "trained"}
    said = {name: {"fate": fate, "why": ""} for name, fate in fates.items()}
    return {"loss": 0.5 if losses else None, "losses": losses, "weights": losses, "seconds": 12.4, "fates": said}


# ---------------------------------------------------------------------------------------------------------------- lines


def test_a_round_names_everyone() -> None:
    """With 20 sites too: a journal has no width, and docs/how-to/deployment.md promises each site's outcome."""
    assert (
        round_line({**line(acme="trained", cork="late"), "round": 3}, 6)
        == "round 3 of 6  loss 0.500  12 s  acme 0.50  cork late"
    )
    assert round_line({**line(a="late"), "round": 3}) == "round 3  no loss  12 s  a late"
    many = {f"hospital-{k}": "trained" for k in range(20)}
    said = round_line({**line(**many, cork="late", lyon="late", bern="refused"), "round": 3}, 6)
    assert all(f"  {name} 0.50" in said for name in many)
    assert all(f"  {one}" in said for one in ("cork late", "lyon late", "bern refused"))
    lost = beside({**line(a="trained", b="offline", c="late"), "round": 3})
    assert lost == ["round 3: c: late: "]
    scores = {"metrics": {}, "site_mean": {"accuracy": 0.6, "examples": 5}}
    assert scores_line(2, scores) == "round 2: accuracy 0.600 at the sites" and scores_line(2, {"metrics": {}}) == ""


def test_no_number_makes_a_line_longer_than_a_screen() -> None:
    """A loss of 1e300 had 304 digits here."""
    wild = {**line(acme="trained", cork="trained")}
    wild |= {"loss": -5e299, "losses": {"acme": 0.5, "cork": -1e300}}
    said = round_line({**wild, "round": 3}, 6)
    assert said == "round 3 of 6  loss -5e+299  12 s  acme 0.50  cork -1e+300"


def test_nobody_prints_what_does_not_print() -> None:
    """A site's name or reason cannot move the cursor: events hold printable text, and lines too."""
    found = round_line({**line(**{"\x1b[2Jevil": "trained"}), "round": 1}, 1)
    assert found.isprintable() and "evil" in found


def test_ctrl_c_before_the_last_round_is_exit_code_130_and_a_service_manager_s_end_is_not(
    tmp_path: Path,
) -> None:
    """As of every other command (docs/how-to/usage.md). SIGTERM is how systemd stops a service that is well."""
    import signal

    import typer

    from fedlora.cli.flower.serve import Stop, tell_end

    place = federation_folder(tmp_path)
    for number, code in [(signal.SIGINT, 130), (signal.SIGTERM, None)]:
        stop = Stop()
        stop.by_signal(number, None)
        assert stop.is_set()
        try:
            tell_end(place, standing(FederationFolder(place)), stop)
            ended = None
        except typer.Exit as exit:
            ended = exit.exit_code
        assert ended == code


def test_the_table_of_rounds_never_understates_epsilon() -> None:
    """13.60302 to three digits is 13.603, which is less; the live line and the table say one number."""
    from rich.console import Console

    from fedlora.cli.flower.serve import _rounds_table

    told = {**line(), "round": 1, "privacy": {"epsilon": 13.60302, "epsilon_planned": 25.1000001}}
    screen = Console(width=80)
    with screen.capture() as captured:
        screen.print(_rounds_table([told]))
    shown = captured.get()
    assert "13.604" in shown and "25.101" in shown and "13.604 of 25.101" in round_line(told, 2)


def test_nodes() -> None:
    assert nodes_line([], ["a", "b"], "quorum 2 of 2") == "online: nobody; missing: a, b (quorum 2 of 2)"
    assert nodes_line(["a", "b"], ["a", "b"], "quorum 2 of 2") == "online: a, b (all 2)"
    heard = nodes_line(["a", "b"], ["a", "b"], "quorum 2 of 2", 40.2)
    assert re.fullmatch(r"online: a, b, .*40 s \(all 2\)", heard), "a node that died since is in the count"


# --------------------------------------------------------------------------------------------------------------- status


def test_where_it_stands_is_read_from_files_that_a_crash_tore(tmp_path: Path) -> None:
    home = federation_folder(tmp_path / "f")
    folder = FederationFolder(home)
    assert standing(folder).done == 0 and not standing(folder).finished
    play_round(home, 1)
    with folder.rounds.open("a") as file:
        file.write('{"round": 2, "los')
    assert rounds_done(folder.rounds) == 1
    for number in (2, 3):
        play_round(home, number)
    assert not standing(folder).finished  # the adapter is not written yet
    end_rounds(home, 3)
    assert standing(folder).why == "complete"
    folder.summary.write_text("{")
    assert not standing(folder).finished
    with pytest.raises(ConfigError, match=r"fedlora flower init.*federation\.toml"):
        standing(FederationFolder(tmp_path))


def loopback(home: Path) -> None:
    """At a port where nobody is."""
    path = home / "federation.toml"
    path.write_text(path.read_text().replace("superlink_port = 18080", "superlink_port = 1"))


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
        "rank": 8, "node": "unknown", "last_seen": None, "fate": "trained", "why": "", "loss": 1.0, "norm": 0.5,
        "fates": {"trained": 1},
    }  # fmt: skip
    assert json.loads(main("flower", "status", home, "--json", "--rounds", 0).out)["last_rounds"] == []
    assert found["sites"]["cork"]["why"] == "so" and found["last_rounds"][0]["fates"]["cork"] == "refused"
    with serving(home / "state" / "serve.lock"):
        said = main("flower", "status", home)
    assert said.code == 0 and "served by process" in said.out and "1 of 3 rounds done" in said.out
    assert "cork, last round: refused: so" in said.out
    assert main("flower", "status", tmp_path).error()


def test_status_names_who_has_not_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = federation_folder(tmp_path / "f")
    told = Journal(home / "server")
    told.asked(1, "train", ["acme", "berlin"])
    told.answered("acme")
    node = NodeFacts("acme", 1, "online", b"", 100.0)
    monkeypatch.setattr("fedlora.flower.serving.status._nodes", lambda folder: {"acme": node})
    with serving(home / "state" / "serve.lock"):
        found = status_of(FederationFolder(home))
    assert found["sites"]["acme"]["last_seen"] == "1970-01-01T00:01:40.000+00:00"  # as all times are
    assert "round 1 of 3 goes on" in headline(found) and "no answer yet: berlin" in headline(found)
    assert found["sites"]["acme"]["node"] == "online" and found["sites"]["berlin"]["node"] == "unknown"


def test_whom_a_rule_left_out_is_on_the_screen(tmp_path: Path, main: Any) -> None:
    """The last round's weights after the rule, of each client in the last round that it was weighed in."""
    home = federation_folder(tmp_path / "f")
    loopback(home)
    play_round(home, 1, after={"acme": 0.5, "berlin": 0.5, "cork": 0.0})
    play_round(home, 2, {"berlin": "late"}, after={"acme": 1.0, "cork": 0.0})
    done = main("flower", "status", home)
    assert done.code == 0, done.err
    said = " ".join(done.out.split())
    assert "multi-krum left out cork (1 of 2 clients)" in said and "50.0%, 0.0%" in said


def test_what_became_of_each_site_is_counted_by_its_own_name() -> None:
    lines = [
        {"weights": {"a": 1.0}, "fates": {"a": {"fate": "trained"}, "b": {"fate": "offline"}}},
        {"weights": {"a": 1.0}, "fates": {"a": {"fate": "trained"}, "b": {"fate": "refused"}}},
    ]
    assert taken_part(Policy({"a": 4}), lines) == {
        "a": {"rank": 4, "rounds": 2}, "b": {"rank": None, "rounds": 0, "offline": 1, "refused": 1},
    }  # fmt: skip
