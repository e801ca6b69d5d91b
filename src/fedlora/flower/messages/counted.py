"""Tells a site which of its work to continue from. Each question does so: only the server knows what counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flwr.app import ConfigRecord, RecordDict

from fedlora.core.echo import quoted
from fedlora.flower.messages.envelope import RecordError
from fedlora.flower.messages.parts import parts

_KEY = "counted"  # in a message's config


@dataclass(frozen=True)
class Counted:
    """What the server knows about one client's work.

    round: the last one in which the work counted. answered: the last one that the client answered, even if it was
    refused; the client has read its data up to there. Both from 1; 0: none. sure: False after a kill in a private
    round, because the server does not know who counted in it; `round` is then the last that may have counted.
    """

    TAG: ClassVar[str] = "counted/1"

    round: int = 0
    answered: int = 0
    sure: bool = True


def put_counted(record: RecordDict, counted: Counted) -> RecordDict:
    """Adds to the message what counted, and returns it."""
    parts(record, ConfigRecord)["config"][_KEY] = [counted.round, counted.answered, int(counted.sure)]
    return record


def counted_of(record: RecordDict) -> Counted:
    """Reads it from a server's message. Raises `RecordError`."""
    said = parts(record, ConfigRecord)["config"].get(_KEY)
    if not isinstance(said, list) or len(said) != 3 or not all(isinstance(n, int) and n >= 0 for n in said):
        raise RecordError(f"the message does not say which of this site's work counted, but {quoted(said, 40)}.")
    return Counted(int(said[0]), int(said[1]), bool(said[2]))


__all__ = ["Counted", "counted_of", "put_counted"]
