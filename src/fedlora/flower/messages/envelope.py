"""What every message says besides its work: the protocol, the current settings, and its sender's facts; to a site also
what became of its earlier work, because only the server knows.

No torch here, because a node's ClientApp process reads this before anything else.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from flwr.app import ConfigRecord, RecordDict

from fedlora.core.text import quoted
from fedlora.errors import FedLoRAError
from fedlora.flower.messages.parts import parts
from fedlora.flower.terms import PROTOCOL


class RecordError(FedLoRAError, ValueError):
    """A record that does not belong to this round's messages."""


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

    counted: the last round in which the work counted: the client goes on from its state after that. answered: the
    same; the client has read its data up to there. Both from 1; 0: none. sure: False after a kill in a private round,
    because the server does not know who counted in it; `counted` is then the last that may have. why: for the site's
    log, why its last work did not count, or had no weight because a robust rule left it out; otherwise "".
    """

    counted: int = 0
    answered: int = 0
    sure: bool = True
    why: str = ""

    def text(self) -> str:
        """The receipt as JSON, for a message."""
        return json.dumps(asdict(self))


def receipt_of(record: RecordDict) -> Receipt:
    """Reads it from a server's message. Raises `RecordError`."""
    said = parts(record, ConfigRecord)["config"].get("receipt")
    try:
        found = Receipt(**json.loads(str(said)))
    except (ValueError, TypeError):
        found = Receipt(-1)
    if any(type(n) is not int or n < 0 for n in (found.counted, found.answered)) or type(found.why) is not str:
        raise RecordError(f"the message does not say which of this site's work counted, but {quoted(said, 40)}.")
    return found


__all__ = [
    "PROTOCOL", "Envelope", "Receipt", "RecordError", "enclose", "opened", "receipt_of",
]  # fmt: skip
