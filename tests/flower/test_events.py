"""The file of events: what is written comes back, whatever happens to the file. Kinds of evidence: contract, attack."""

from __future__ import annotations

import json
import os
import re
import resource
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedlora.flower.rounds import events
from fedlora.flower.rounds.events import (
    AttemptFailed,
    Awaited,
    Began,
    Done,
    Ended,
    Event,
    EventReader,
    EventWriter,
    Fated,
    PolicyChanged,
    read_events,
)
from fedlora.flower.rounds.log_lines import lines_of

AT = "2026-01-31T12:00:00.000+00:00"
ALL: list[Event] = [
    Began(3, 1, ("acme", "berlin"), {"cork": {"fate": "offline", "why": "it is not online"}}, 600.0, at=AT),
    Fated(3, 1, "acme", "trained", "", 12.5, 0.4, 100.0, 0.7, 81920, at=AT),
    Fated(3, 1, "berlin", "late", "no answer within 600 s", 600.0, at=AT),
    AttemptFailed(3, 1, "2 of 3 usable uploads", at=AT),
    PolicyChanged(3, {"dublin": 4}, ("cork",), {"acme": (2, 4)}, at=AT),
    Done(3, {"round": 3, "losses": {"acme": 0.4}, "fates": {"acme": {"fate": "trained", "why": ""}}}, at=AT),
    Ended(3, "complete", at=AT),
]


def written(path: Path, count: int) -> list[Event]:
    found: list[Event] = [Ended(n, "complete", at=AT) for n in range(count)]
    for event in found:
        EventWriter(path).write(event)
    return found


@pytest.mark.parametrize("event", ALL, ids=lambda event: event.NAME)
def test_an_event_comes_back_as_it_was(tmp_path: Path, event: Event) -> None:
    EventWriter(tmp_path / "server" / "events.jsonl").write(event)
    assert read_events(tmp_path / "server" / "events.jsonl") == [event]


def test_the_lines_are_what_the_page_says(tmp_path: Path) -> None:
    """The format that `serve`, `status` and strangers' programs read: spelt out here, not taken from the code."""
    for event in ALL:
        EventWriter(tmp_path / "e").write(event)
    lines = [json.loads(line) for line in (tmp_path / "e").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["began", "fate", "fate", "again", "policy", "done", "ended"]
    assert lines[0] == {
        "at": AT,
        "event": "began",
        "round": 3,
        "attempt": 1,
        "asked": ["acme", "berlin"],
        "not_asked": {"cork": {"fate": "offline", "why": "it is not online"}},
        "deadline": 600.0,
    }
    assert lines[1] == {
        "at": AT,
        "event": "fate",
        "round": 3,
        "attempt": 1,
        "client": "acme",
        "fate": "trained",
        "why": "",
        "seconds": 12.5,
        "loss": 0.4,
        "examples": 100.0,
        "norm": 0.7,
        "bytes": 81920,
    }
    assert lines[5]["losses"] == {"acme": 0.4} and lines[5]["round"] == 3


def test_who_is_waited_for_is_written_and_said(tmp_path: Path) -> None:
    EventWriter(tmp_path / "e").write(Awaited(3, "measuring", ["cork", "a\nb"], 60.2, 539.8))
    [event] = read_events(tmp_path / "e")
    assert isinstance(event, Awaited)
    assert re.fullmatch(r"round 3: .*60 s: cork, a\\nb \(measuring\); .*9 min.*", "".join(lines_of(event)))


def test_what_a_robust_rule_did_is_said() -> None:
    """Of a round's line, as `judged` writes it: who was left out."""
    kept = {"weight": 0.5, "coefficient": 1.0, "norm": 1.0, "reason": ""}
    clients = {"acme": kept, "cork": {**kept, "coefficient": 0.0, "reason": "far from the others"}}
    line = {"defence": {"rule": "multi-krum (f = 1)", "clients": clients}}
    said = lines_of(Done(3, line))
    assert any("multi-krum left out cork (1 of 2 clients)" in one for one in said)


def test_the_time_of_now_is_written() -> None:
    assert json.loads(events.as_line(Ended(1, "complete")))["at"][:2] == "20"


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_null(tmp_path: Path, number: float) -> None:
    EventWriter(tmp_path / "e").write(Fated(1, 1, "a", "refused", loss=number, norm=number))
    EventWriter(tmp_path / "e").write(Done(1, {"losses": {"a": number}, "deep": [{"x": (number,)}]}))

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    lines = [json.loads(text, parse_constant=refuse) for text in (tmp_path / "e").read_text().splitlines()]
    assert lines[0]["loss"] is None and lines[1]["deep"] == [{"x": [None]}]
    fated = read_events(tmp_path / "e")[0]
    assert isinstance(fated, Fated) and fated.loss is None


def test_text_of_strangers_is_one_bounded_line(tmp_path: Path) -> None:
    evil = "\x1b[2Jgone\n{}\u202e" + "x" * 100_000
    EventWriter(tmp_path / "e").write(Fated(1, 1, evil, "failed", evil))
    EventWriter(tmp_path / "e").write(Done(1, {"refused": {evil: evil}}))
    raw = (tmp_path / "e").read_text()
    assert raw.count("\n") == 2 and raw.isascii() and "\x1b" not in raw and len(raw) < 10_000
    found = read_events(tmp_path / "e")[0]
    assert isinstance(found, Fated) and found.why.isprintable() and len(found.why) <= 1000


def test_a_torn_last_line_waits_and_the_next_writer_begins_below_it(tmp_path: Path) -> None:
    """A run killed in the middle of a line: half of it stands there, and the next process writes on."""
    path = tmp_path / "e"
    whole = written(path, 2)
    with path.open("ab") as file:
        file.write(events.as_line(Ended(7, "complete")).encode()[:-20])
    reader = EventReader(path)
    assert reader.new() == whole and reader.new() == []
    EventWriter(path).write(Ended(8, "complete", at=AT))
    assert reader.new() == [Ended(8, "complete", at=AT)]
    assert read_events(path) == [*whole, Ended(8, "complete", at=AT)]


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_line_that_is_still_being_written_is_read_once_it_is_whole(tmp_path: Path, cut: int) -> None:
    path, line = tmp_path / "e", events.as_line(Ended(7, "complete", at=AT)).encode()
    reader = EventReader(path)
    assert reader.new() == []  # no file yet
    path.write_bytes(line[:cut])
    assert reader.new() == []
    with path.open("ab") as file:
        file.write(line[cut:])
    assert reader.new() == [Ended(7, "complete", at=AT)] and reader.new() == []


@pytest.mark.parametrize(
    "junk",
    [
        b"\xff\xfe\x00",
        b"null",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"event": "fate", "at": 3, "round": 1}',
        b'{"event": "fate", "at": "x", "round": "1"}',
        b'{"event": "fate", "at": "x", "round": 1, "attempt": 1, "client": "a", "fate": "eaten"}',
        b'{"event": "began", "at": "x", "round": 1}',
        b'{"event": ["began"], "at": "x", "round": 1}',
        b'{"event": "of a later version", "at": "x", "round": 1}',
    ],
)
def test_lines_that_are_no_events_are_skipped(tmp_path: Path, junk: bytes) -> None:
    path = tmp_path / "e"
    first = written(path, 1)
    with path.open("ab") as file:
        file.write(junk + b"\n")
    EventWriter(path).write(Ended(8, "complete", at=AT))
    assert read_events(path) == [*first, Ended(8, "complete", at=AT)]


def test_what_a_later_version_adds_to_a_line_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "e").write_text(json.dumps({"event": "ended", "at": AT, "round": 2, "why": "quorum", "new": 1}) + "\n")
    assert read_events(tmp_path / "e") == [Ended(2, "quorum", at=AT)]


def test_a_file_that_was_moved_away_or_emptied_is_read_from_the_new_ones_begin(tmp_path: Path) -> None:
    path = tmp_path / "e"
    written(path, 2)
    reader = EventReader(path)
    assert len(reader.new()) == 2
    os.rename(path, tmp_path / "e.1")
    assert reader.new() == []
    for why in ("complete", "stopped early"):
        EventWriter(path).write(Ended(11, why, at=AT))
        assert reader.new() == [Ended(11, why, at=AT)]
        os.truncate(path, 0)
        assert reader.new() == []


def test_a_disk_that_refuses_half_way_costs_that_line_alone(tmp_path: Path) -> None:
    """By a limit on the sizes of files, for the write stops in the middle as on a full disk."""
    path = tmp_path / "e"
    whole = written(path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            EventWriter(path).write(Ended(9, "complete"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not path.read_bytes().endswith(b"\n") and read_events(path) == whole
    EventWriter(path).write(Ended(10, "complete", at=AT))
    assert read_events(path) == [*whole, Ended(10, "complete", at=AT)]


def test_nothing_is_written_without_a_path() -> None:
    EventWriter(None).write(ALL[0])
