"""What every message says besides its work: the protocol, the current settings, and its sender's facts; to a site also
which of its earlier work counted, because only the server knows.

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


@dataclass(frozen=True)
class Envelope:
    """settings: `FederationSettings.travelling`, "" in a reply. facts: the sender's `Facts.text`, "" if it has none."""

    settings: str = ""
    facts: str = ""


def enclose(record: RecordDict, envelope: Envelope) -> RecordDict:
    """The record with the envelope."""
    config = parts(record, ConfigRecord)["config"]
    config["protocol"] = PROTOCOL
    config["settings"], config["agreement"] = envelope.settings, envelope.facts
    return record


def opened(record: RecordDict, sender: str, reader: str) -> Envelope:
    """What a message says besides its work.

    Args:
        sender, reader: the names of the two in error messages, "the server" and "this site".

    Raises:
        RecordError: the message has another protocol (the text names both), or is not a message of fedlora.
    """
    config = parts(record, ConfigRecord).get("config")
    theirs = config.get("protocol") if config is not None else None
    if theirs != PROTOCOL:
        raise RecordError(
            f"{sender} sent a message of protocol {quoted(theirs, 40)}, and {reader} speaks {PROTOCOL}: install one "
            f"version of fedlora on both sides."
        )
    assert config is not None
    said = [config.get(key, "") for key in ("settings", "agreement")]
    if not all(isinstance(text, str) and len(text) <= 16 * 2**20 for text in said):
        raise RecordError(f"the settings or the agreement in the message of {sender} are not text.")
    return Envelope(str(said[0]), str(said[1]))


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
    said = parts(record, ConfigRecord)["config"].get("receipt")
    try:
        found = Receipt(**json.loads(str(said)))
    except (ValueError, TypeError, RecursionError):
        found = Receipt(-1)
    if type(found.counted) is not int or found.counted < 0 or type(found.why) is not str:
        raise RecordError(f"the message does not say which of this site's work counted, but {quoted(said, 40)}.")
    return found
