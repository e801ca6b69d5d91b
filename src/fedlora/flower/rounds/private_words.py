"""What a private federation's server tells, and whom: what `fedlora.privacy.released` lets out goes into files that may
be handed out and onto screens, and all else into FED/server/private/log, for the operator alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from fedlora.core.echo import shown
from fedlora.flower.ownership import opened_here
from fedlora.flower.places import FederationFolder
from fedlora.flower.rounds.events import Began, Ended, Event, PolicyChanged
from fedlora.privacy.released import fate_of, filtered, items

RELEASED = {"released": True}  # of a log record that may be seen: `extra=RELEASED`
_WORDS = ("complete", "stopped early", "budget", "interrupted")


def public_line(line: Mapping[str, Any], privacy: Mapping[str, Any]) -> dict[str, Any]:
    """A line of rounds.jsonl. Where its readers expect a table it stays, empty, whatever there was."""
    return filtered("rounds.jsonl", {**line, "privacy": privacy}, public=True, blank=True)


def public_event(event: Event, members: Sequence[str]) -> Event | None:
    """As events.jsonl may have it; None for one that tells of single sites. All members are asked, so `asked` names all
    of them, online or not. The line of a `Done` is public before it comes here."""
    if fate_of("events.jsonl", event.NAME) == "released":
        return event
    if isinstance(event, Began):
        event = replace(event, attempt=1, asked=tuple(members))
    if isinstance(event, PolicyChanged) and event.why:
        event = replace(event, why="policy.toml cannot be used; why stands in private/log")
    if isinstance(event, Ended):
        event = replace(event, why=event.why if event.why in _WORDS else "failed")
    facts = {field.name: getattr(event, field.name) for field in fields(event)}
    told = filtered("events.jsonl", {event.NAME: facts}, public=True, blank=True)
    return type(event)(**told[event.NAME]) if told.get(event.NAME) else None


def public_summary(summary: Mapping[str, Any], privacy: Mapping[str, Any]) -> dict[str, Any]:
    """A federation's summary.json. withheld: the names that no private one tells, by file: what is null or empty under
    one of them was withheld, whatever there was."""
    withheld = {
        place: [item.name for item in items(place) if item.fate == "dropped"]
        for place in ("rounds.jsonl", "federation summary.json")
    }
    told = {**summary, "privacy": privacy, "withheld": withheld}
    return filtered("federation summary.json", told, public=True, blank=True)


def public_numbers(numbers: Mapping[str, float], line: Mapping[str, Any]) -> dict[str, float]:
    """What trackers are told of a round."""
    privacy = line.get("privacy") or {}
    spent = {f"privacy/{name}": float(privacy[name]) for name in ("epsilon", "epsilon_planned") if name in privacy}
    return filtered("tracker", {**numbers, **spent}, public=True)


def private_folder(home: FederationFolder) -> Path:
    """FED/server/private."""
    return home.server / "private"


def has_released(home: FederationFolder) -> bool:
    """Whether a noised sum was ever made here."""
    return any((private_folder(home) / "journal").glob("*"))


def append_secret(folder: Path, line: str) -> None:
    """A line of FOLDER/log. Where it cannot be written the federation goes on: that it ended would tell."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        descriptor = opened_here(folder / "log", os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, f"{shown(line, 2000)}\n".encode("utf-8", "backslashreplace"))
        finally:
            os.close(descriptor)


@contextmanager
def logs_kept_secret(note: Callable[[str], None]) -> Iterator[None]:
    """What fedlora logs meanwhile goes to `note`, but for records that are marked `RELEASED`."""
    package = logging.getLogger("fedlora")
    handlers, propagate = package.handlers[:], package.propagate
    package.handlers, package.propagate = [_Parted(note, handlers, propagate)], False
    try:
        yield
    finally:
        package.handlers, package.propagate = handlers, propagate


class _Parted(logging.Handler):
    """Hands released records to those who had them before, and others to `note`."""

    def __init__(self, note: Callable[[str], None], before: Sequence[logging.Handler], propagate: bool) -> None:
        super().__init__()
        self._note, self._before, self._propagate = note, before, propagate

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, "released", False):
            cause = f" ({record.exc_info[1]!r})" if record.exc_info and record.exc_info[1] is not None else ""
            self._note(f"{record.getMessage()}{cause}")
            return
        for handler in self._before:
            if record.levelno >= handler.level:
                handler.handle(record)
        if self._propagate:
            logging.getLogger().callHandlers(record)


__all__ = [
    "RELEASED",
    "append_secret",
    "has_released",
    "logs_kept_secret",
    "private_folder",
    "public_event",
    "public_line",
    "public_numbers",
    "public_summary",
]  # fmt: skip
