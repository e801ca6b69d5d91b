"""What is said of a federation: lines, status. Kind: *unit*. Expected values by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedlora.flower.locks import serving
from fedlora.flower.rounds.events import (
    AttemptFailed,
    Began,
    Done,
    Ended,
    Event,
    EventWriter,
    Fated,
    PolicyChanged,
)
from fedlora.flower.rounds.finishing import taken_part
from fedlora.flower.rounds.log_lines import lines_of, nodes_line, round_line
from fedlora.flower.rounds.progress import progress_of
from fedlora.flower.rounds.round_lines import rounds_done

from fedlora.errors import ConfigError
from fedlora.flower.places import FederationFolder
from fedlora.flower.serving.standing import standing
from fedlora.flower.serving.status import headline, status_of
from fedlora.flower.serving.superlink import NodeFacts
from fedlora.flower.terms.policy import Policy
from support.fake_link import end_rounds, federation_folder, play_round


def line(**fates: str) -> dict[str, Any]:
    losses = {name: 0.5 for name, fate in fates.items() if fate == "trained"}
    said = {name: {"fate": fate, "why": ""} for name, fate in fates.items()}
    return {"loss": 0.5 if losses else None, "losses": losses, "weights": losses, "seconds": 12.4, "fates": said}


# ---------------------------------------------------------------------------------------------------------------- lines


def test_a_round_names_everyone() -> None:
    """With 20 sites too: a journal has no width, and docs/how-to/deployment.md promises each site's outcome."""
    assert round_line(line(acme="trained", cork="late"), 3, 6) == "round 3 of 6  loss 0.500  12 s  acme 0.50  cork late"
    assert round_line(line(a="late"), 3, None) == "round 3  no loss  12 s  a late"
    many = {f"hospital-{k}": "trained" for k in range(20)}
    said = round_line(line(**many, cork="late", lyon="late", bern="refused"), 3, 6)
    assert all(f"  {name} 0.50" in said for name in many)
    assert all(f"  {one}" in said for one in ("cork late", "lyon late", "bern refused"))
    with_metrics = {**line(a="trained"), "metrics": {"accuracy": 0.75}}
    assert round_line(with_metrics, 1, 2) == "round 1 of 2  loss 0.500  12 s  accuracy 0.750  a 0.50"


def test_no_number_makes_a_line_longer_than_a_screen() -> None:
    """A loss of 1e300 had 304 digits here."""
    wild = {**line(acme="trained", cork="trained"), "metrics": {"perplexity": 1e200}}
    wild |= {"loss": -5e299, "losses": {"acme": 0.5, "cork": -1e300}}
    said = round_line(wild, 3, 6)
    assert said == "round 3 of 6  loss -5e+299  12 s  perplexity 1e+200  acme 0.50  cork -1e+300"


def test_who_did_not_train_is_a_line_with_the_reason() -> None:
    assert lines_of(Fated(2, 0, "cork", "late", "no answer within 60 s")) == [
        "round 2: cork: late: no answer within 60 s"
    ]
    for quiet in ("trained", "offline", "not drawn"):
        assert lines_of(Fated(2, 0, "cork", quiet, "x")) == []  # type: ignore[arg-type]
    assert lines_of(Began(2, 0, ["acme"], {}, 60.0)) == []
    alone = Began(2, 0, [], {"cork": {"fate": "offline", "why": ""}}, 60.0)
    assert re.fullmatch(r"round 2: .*: cork \(offline\)", *lines_of(alone))
    assert re.fullmatch("round 2, attempt 1, .*: 1 of 2", *lines_of(AttemptFailed(2, 1, "1 of 2")))
    assert re.fullmatch("the rounds ended .* 6: complete", *lines_of(Ended(6, "complete")))
    changed = PolicyChanged(3, {"dublin": 4}, ["cork"], {"acme": (8, 4)}, "")
    for said, words in zip(
        lines_of(changed), ("dublin .*rank 4", "cork .*no longer", "acme .*rank 4 .*8"), strict=True
    ):
        assert re.match(f"from round 3 on: {words}", said)


def test_nobody_prints_what_does_not_print() -> None:
    """A site's name or reason cannot move the cursor: events hold printable text, and lines too."""
    found = round_line(line(**{"\x1b[2Jevil": "trained"}), 1, 1)
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
    assert "13.604" in shown and "25.101" in shown and "13.604 of 25.101" in round_line(told, 1, 2)


def test_nodes() -> None:
    assert nodes_line([], ["a", "b"], "quorum 2 of 2") == "online: nobody; missing: a, b (quorum 2 of 2)"
    assert nodes_line(["a", "b"], ["a", "b"], "quorum 2 of 2") == "online: a, b (all 2)"
    heard = nodes_line(["a", "b"], ["a", "b"], "quorum 2 of 2", 40.2)
    assert re.fullmatch(r"online: a, b, .*40 s \(all 2\)", heard), "a node that died since is in the count"


# ------------------------------------------------------------------------------------------------------------- progress


def test_a_round_that_is_played_again_counts_once() -> None:
    """After a crash the ServerApp goes back to its checkpoint: round 2 is begun and done twice."""
    two: list[Event] = [Began(2, 0, ["a"], {}, 9.0), Fated(2, 0, "a", "trained", bytes=5), Done(2, line(a="trained"))]
    again: list[Event] = [Done(1, line(a="late")), *two, Began(2, 0, ["a"], {}, 9.0)]
    found = progress_of(again)
    assert found.round == 1 and found.playing is not None
    found = progress_of([*again, *two[1:]])
    assert found.round == 2 and found.playing is None
    assert found.fate_counts == {("a", "late"): 1, ("a", "trained"): 1}
    assert found.uploaded == {"a": 10}


def test_what_became_of_a_site_in_an_attempt_that_did_not_count_is_counted_too() -> None:
    """By hand. The close refuses a's upload; b is away; then a is not asked, and the round's line has
    its fate of the first attempt."""
    away = {"b": {"fate": "offline", "why": ""}}
    first: list[Event] = [
        Began(1, 1, ["a"], away, 9.0), Fated(1, 1, "a", "trained", bytes=5), Fated(1, 1, "a", "refused", bytes=5),
        AttemptFailed(1, 1, "too few"),
    ]  # fmt: skip
    again = {"a": {"fate": "not drawn", "why": ""}}
    second: list[Event] = [
        Began(1, 2, ["b"], again, 9.0), Fated(1, 2, "b", "trained", bytes=7),
        Done(1, line(a="refused", b="trained")),
    ]  # fmt: skip
    found = progress_of([*first, *second])
    assert found.uploaded == {"a": 5, "b": 7}
    assert found.fate_counts == {
        ("a", "refused"): 1, ("b", "offline"): 1, ("b", "trained"): 1,
    }  # fmt: skip


def test_the_end_is_forgotten_when_rounds_are_added() -> None:
    ended: list[Event] = [Done(1, line(a="trained")), Ended(1, "complete")]
    assert progress_of(ended).ended == "complete"
    assert progress_of([*ended, Began(2, 0, ["a"], {}, 9.0)]).ended == ""


def test_long_runs_do_not_fill_the_memory() -> None:
    found = progress_of([Done(k, line(a="trained")) for k in range(1, 501)])
    assert found.round == 500 and len(found.lines) == 100 and found.fate_counts == {("a", "trained"): 500}


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
        "fates": {"trained": 1}, "upload_bytes": 1000,
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
    events = EventWriter(home / "server" / "events.jsonl")
    events.write(Began(1, 0, ["acme", "berlin"], {}, 60.0))
    events.write(Fated(1, 0, "acme", "trained"))
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


def test_how_good_it_is_at_the_sites_and_who_was_not_measured_is_told() -> None:
    line = {
        "loss": 0.5,
        "losses": {"a": 0.5, "b": 0.5}, "seconds": 1, "metrics": {}, "site_mean": {"loss": 0.7, "accuracy": 0.6,
        "examples": 5}, "fates": {"a": {"fate": "trained"}, "b": {"fate": "trained"}, "c": {"fate": "offline"}},
        "weights": {"a": 0.5, "b": 0.5},
        "site_unmeasured": {"b": "no answer", "c": "it is not online"},
    }  # fmt: skip
    done, unmeasured = lines_of(Done(2, line), 6)
    assert done == "round 2 of 6  loss 0.500  1 s  accuracy 0.600 at sites  a 0.50  b 0.50  c offline"
    assert "b: not measured: no answer" in unmeasured
    assert "accuracy 0.600 at sites" in round_line(line, 2, 6) and "0.700" not in round_line(line, 2, 6)
    assert " 8 " in lines_of(Ended(6, "complete"), 8)[0]
    assert lines_of(Ended(6, "complete"), 6) == lines_of(Ended(6, "complete"))


def test_what_became_of_each_site_is_counted_by_its_own_name() -> None:
    lines = [
        {"weights": {"a": 1.0}, "fates": {"a": {"fate": "trained"}, "b": {"fate": "offline"}}},
        {"weights": {"a": 1.0}, "fates": {"a": {"fate": "trained"}, "b": {"fate": "refused"}}},
    ]
    assert taken_part(Policy({"a": 4}), lines) == {
        "a": {"rank": 4, "rounds": 2}, "b": {"rank": None, "rounds": 0, "offline": 1, "refused": 1},
    }  # fmt: skip
