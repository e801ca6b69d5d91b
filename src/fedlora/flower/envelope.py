"""What every message says besides its work: the protocol; to a site also by which terms the server plays, and which of
the site's earlier work counted, because only the server knows.

No torch here, because a node's ClientApp process reads this before anything else.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TypeVar

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedlora.core.text import quoted
from fedlora.errors import FedLoRAError
from fedlora.flower.terms import PROTOCOL

T = TypeVar("T", ArrayRecord, ConfigRecord, MetricRecord)


class RecordError(FedLoRAError, ValueError):
    """A record that does not belong to this round's messages."""


def parts(record: RecordDict, kind: type[T]) -> dict[str, T]:
    """Name -> each part of that kind; the part itself, not a copy.

    Flower's own `record.array_records` makes an object that refers to itself and to the record. Python frees such a
    cycle only at its next search for cycles, which counts objects and not their bytes: a server held ten adapters.
    """
    return {name: part for name, part in record.items() if isinstance(part, kind)}


def enclose(record: RecordDict, terms: str = "") -> RecordDict:
    """The record with the envelope. terms: `JoinFile.terms`, "" in a reply and where there is no such file."""
    config = parts(record, ConfigRecord)["config"]
    config["protocol"], config["terms"] = PROTOCOL, terms
    return record


def opened(record: RecordDict, sender: str, reader: str) -> str:
    """The terms of a message. sender, reader: the names of the two in errors, "the server" and "this site".

    Raises:
        RecordError: the message has another protocol (the text names both), or is not a message of fedlora.
    """
    config = parts(record, ConfigRecord).get("config") or ConfigRecord()
    theirs = config.get("protocol")
    if theirs != PROTOCOL:
        raise RecordError(
            f"{sender} sent a message of protocol {quoted(theirs, 40)}, and {reader} speaks {PROTOCOL}: install one "
            f"version of fedlora on both sides."
        )
    return str(config.get("terms"))


@dataclass(frozen=True)
class Receipt:
    """What the server knows about one client's work.

    counted: the last round in which the work counted, from 1; 0: none. The client goes on from its state after that
    round, and from its place in its data then. why: for the site's log, why its last work did not count, or had no
    weight because a robust rule left it out; otherwise "".
    """

    counted: int = 0
    why: str = ""

    def text(self) -> str:
        """The receipt as JSON, for a message."""
        return json.dumps(asdict(self))


def receipt_of(record: RecordDict) -> Receipt:
    """Reads it from a server's message. Raises `RecordError`."""
    text = parts(record, ConfigRecord)["config"].get("receipt")
    try:
        found = Receipt(**json.loads(str(text)))
    except (ValueError, TypeError, RecursionError):
        found = Receipt(-1)
    if type(found.counted) is not int or found.counted < 0 or type(found.why) is not str:
        raise RecordError(f"the message does not say which of this site's work counted, but {quoted(text, 40)}.")
    return found
