"""A federation's events as they happen: FED/server/events.jsonl, one JSON object per line.

The ServerApp writes, others read: `fedlora flower serve`, `status`, and the metrics. Every reader skips a line that a
crash tore, and the next writer starts below it. Numbers that are not finite are written as null, and text is on one
line, printable and bounded, whoever sent it.

    {"at": "2026-01-31T12:00:00.000+00:00", "event": "fate", "round": 3, "attempt": 1, "client": "acme",
     "fate": "trained", "why": "", "seconds": 12.3, "loss": 0.4, "examples": 100.0, "norm": 0.7, "bytes": 81920}

The keys of the others are the fields below; those of a finished round are its line of rounds.jsonl.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from pydantic.dataclasses import dataclass

from fedlora.core.text import shown
from fedlora.given_files import opened, parse_json
from fedlora.runs.folder import plain

Fate = Literal["trained", "abstained", "refused", "failed", "late", "offline", "not sent", "not drawn"]
REFUSED = "it would fail again: "  # begins a run's words about the folder's own files, for `serve` (exit code 2)
_MOST = 1000  # letters in a text
Names = tuple[str, ...]
Table = Mapping[str, Any]


@dataclass(frozen=True)
class _Event:
    """round: that it tells of. at: when it was written. NAME: `event` in the file."""

    NAME: ClassVar[str]
    round: int
    at: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class Began(_Event):
    """An attempt at a round begins. asked: who gets a message; or the fate "not sent", if none could be made or sent.
    not_asked: everyone else -> {"fate", "why"}, in this attempt. deadline: seconds for the replies."""

    NAME = "began"
    attempt: int
    asked: Names
    not_asked: Mapping[str, Mapping[str, str]]
    deadline: float | None


@dataclass(frozen=True)
class Fated(_Event):
    """An asked client's fate. seconds: since the question. norm: of its update, as in `norms`. bytes: of its reply. A
    later event for the same round and client replaces an earlier one."""

    NAME = "fate"
    attempt: int
    client: str
    fate: Fate
    why: str = ""
    seconds: float | None = None
    loss: float | None = None
    examples: float | None = None
    norm: float | None = None
    bytes: int | None = None


@dataclass(frozen=True)
class Awaited(_Event):
    """The others wait for some clients. doing: "training" or "measuring". clients: those without an answer for
    `seconds`. left: seconds until the deadline, at which the round continues without them."""

    NAME = "awaited"
    doing: str
    clients: Names
    seconds: float
    left: float


@dataclass(frozen=True)
class Done(_Event):
    """A round is done. line: its line of rounds.jsonl."""

    NAME = "done"
    line: Table


@dataclass(frozen=True)
class AttemptFailed(_Event):
    """An attempt did not count. The round is tried again, or the run ends."""

    NAME = "again"
    attempt: int
    why: str


@dataclass(frozen=True)
class PolicyChanged(_Event):
    """The policy has other clients than in the round before, even if no server ran in between. added: name -> rank.
    changed: name -> (old rank, new rank). why: the error in a file that was rejected; the previous policy stays until
    the run ends."""

    NAME = "policy"
    added: Table = field(default_factory=dict)
    removed: Names = ()
    changed: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    why: str = ""


@dataclass(frozen=True)
class Ended(_Event):
    """No more rounds in this process. round: the last finished one. why: "complete", "stopped early", ..."""

    NAME = "ended"
    why: str


Event = Began | Fated | Awaited | Done | AttemptFailed | PolicyChanged | Ended
_KINDS: Mapping[str, type[Event]] = {kind.NAME: kind for kind in get_args(Event)}


class EventWriter:
    """Appends to the events file; with None, writes nothing.

    Example:
        >>> events = EventWriter(folder / "events.jsonl")
        >>> events.write(Fated(1, 1, "acme", "late", "no answer within 600 s", seconds=600.0))
        >>> read_events(folder / "events.jsonl")[-1].fate
        'late'
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def write(self, event: Event) -> None:
        """Write one line at once. Raises `OSError` if the disk refuses; half of the line may be there then."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a+b") as file:
            torn = file.seek(0, os.SEEK_END) > 0 and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n"
            file.write((b"\n" if torn else b"") + as_line(event).encode())


class EventReader:
    """The events of a file, in any number of reads: each gives the events since the one before.

    A missing file is empty. A file that became shorter is a new one, and read from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._position = path, 0

    def new(self) -> list[Event]:
        """The events since the last read. An unfinished last line waits for the next read."""
        try:
            with opened(self._path) as file:
                if os.fstat(file.fileno()).st_size < self._position:
                    self._position = 0
                file.seek(self._position)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._position += len(whole) + len(newline)
        return [event for event in map(as_event, whole.split(b"\n")) if event is not None]


def read_events(path: Path) -> list[Event]:
    """All events of a file; none if there is no file."""
    return EventReader(path).new()


def as_line(event: Event) -> str:
    """The event as its line, with the current time if its own is empty."""
    at = event.at or datetime.now(UTC).isoformat(timespec="milliseconds")
    if isinstance(event, Done):
        said = {**event.line, "round": event.round}
    else:
        said = {f.name: getattr(event, f.name) for f in fields(event)}
    return json_line({**said, "at": at, "event": event.NAME})


def as_event(line: bytes) -> Event | None:
    """The event of a line; None for a torn line, or an unknown kind."""
    try:
        said = parse_json(line, nan_as_none=True)
        kind, at = _KINDS[said.pop("event")], said.pop("at")
        if kind is Done:
            return Done(said["round"], said, at=at)
        return kind(**said, at=at)  # pydantic leaves out what this version does not know
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def json_line(facts: Mapping[str, Any]) -> str:
    """Facts as a line of JSON: no NaN, no infinity, and no text that is long or does not print."""
    return json.dumps(_printable(plain(facts)), sort_keys=True, allow_nan=False) + "\n"


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return shown(value, _MOST)
    if isinstance(value, Mapping):
        return {shown(key, _MOST): _printable(item) for key, item in value.items()}
    return [_printable(item) for item in value] if isinstance(value, list) else value
