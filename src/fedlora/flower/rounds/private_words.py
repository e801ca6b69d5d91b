"""The output of a private federation's server: what `fedlora.privacy.released` allows goes into files that may be
published and onto screens, everything else into FED/server/private/log, for the operator alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from fedlora.core.text import shown
from fedlora.flower.ownership import opened_here
from fedlora.flower.places import FederationFolder
from fedlora.flower.rounds.events import Began, Ended, Event, PolicyChanged
from fedlora.privacy.released import fate_of, filtered

RELEASED = {"released": True}  # marks a log record that may be shown: `extra=RELEASED`
_WORDS = ("complete", "stopped early", "budget", "interrupted")


def public_line(line: Mapping[str, Any], privacy: Mapping[str, Any]) -> dict[str, Any]:
    """A line of rounds.jsonl. Tables that readers expect stay, but empty, whatever they held."""
    return filtered("rounds.jsonl", {**line, "privacy": privacy}, public=True, blank=True)


def public_event(event: Event, members: Sequence[str]) -> Event | None:
    """The event for events.jsonl, without its time; None for one about single sites. All members are asked, so `asked`
    names all of them, online or not. The line of a `Done` is already public."""
    event = replace(event, at=None)
    if fate_of("events.jsonl", event.NAME) == "released":
        return event
    if isinstance(event, Began):
        event = replace(event, attempt=1, asked=tuple(members))
    if isinstance(event, PolicyChanged) and event.why:
        event = replace(event, why="policy.toml cannot be used; private/log says why")
    if isinstance(event, Ended):
        event = replace(event, why=event.why if event.why in _WORDS else "failed")
    facts = {field.name: getattr(event, field.name) for field in fields(event)}
    told = filtered("events.jsonl", {event.NAME: facts}, public=True, blank=True)
    return type(event)(**told[event.NAME]) if told.get(event.NAME) else None


def has_released(home: FederationFolder) -> bool:
    """Whether a noised sum was ever made here."""
    return any((home.private / "journal").glob("*"))


def append_secret(folder: Path, line: str) -> None:
    """Append a line to FOLDER/log. If that fails, the federation continues, because stopping would reveal something."""
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
    """Send fedlora's log to `note` meanwhile, except for records marked `RELEASED`."""
    package = logging.getLogger("fedlora")
    handlers, propagate = package.handlers[:], package.propagate
    package.handlers, package.propagate = [_Parted(note, handlers, propagate)], False
    try:
        yield
    finally:
        package.handlers, package.propagate = handlers, propagate


class _Parted(logging.Handler):
    """Passes released records to the previous handlers, and others to `note`."""

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
