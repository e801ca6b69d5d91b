"""Which of its work a site goes on from. The server says so with each question: only it knows what counted."""

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
    """What the server knows of one client's work.

    round: the last one in which it counted. answered: the last one that the client answered, even if it was refused: so
    far has it read its data. Both from 1; 0: none. sure: False after a kill in a private round, of which the server
    does not know who counted: `round` is then the last that can be.
    """

    TAG: ClassVar[str] = "counted/1"

    round: int = 0
    answered: int = 0
    sure: bool = True


def put_counted(record: RecordDict, counted: Counted) -> RecordDict:
    """The message, which now says what counted."""
    parts(record, ConfigRecord)["config"][_KEY] = [counted.round, counted.answered, int(counted.sure)]
    return record


def counted_of(record: RecordDict) -> Counted:
    """What a server's message says. Raises `RecordError`."""
    said = parts(record, ConfigRecord)["config"].get(_KEY)
    if not isinstance(said, list) or len(said) != 3 or not all(isinstance(n, int) and n >= 0 for n in said):
        raise RecordError(f"the message does not say which of this site's work counted, but {quoted(said, 40)}.")
    return Counted(int(said[0]), int(said[1]), bool(said[2]))


__all__ = ["Counted", "counted_of", "put_counted"]
