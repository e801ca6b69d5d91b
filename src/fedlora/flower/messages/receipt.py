"""What the server tells a site about the site's own work, with each message: only the server knows what counted."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import ClassVar

from flwr.app import ConfigRecord, RecordDict

from fedlora.core.echo import quoted
from fedlora.flower.messages.envelope import RecordError
from fedlora.flower.messages.parts import parts

_KEY = "receipt"  # in a message's config


@dataclass(frozen=True)
class Receipt:
    """What the server knows about one client's work.

    counted: the last round in which the work counted. answered: the last one that the client answered, even if it was
    refused; the client has read its data up to there. Both from 1; 0: none. sure: False after a kill in a private
    round, because the server does not know who counted in it; `counted` is then the last that may have. why: why its
    last work did not count, for the site's log; "" if it counted.
    """

    TAG: ClassVar[str] = "receipt/1"

    counted: int = 0
    answered: int = 0
    sure: bool = True
    why: str = ""


def put_receipt(record: RecordDict, receipt: Receipt) -> RecordDict:
    """Adds it to a message, and returns that."""
    parts(record, ConfigRecord)["config"][_KEY] = json.dumps(asdict(receipt))
    return record


def receipt_of(record: RecordDict) -> Receipt:
    """Reads it from a server's message. Raises `RecordError`."""
    said = parts(record, ConfigRecord)["config"].get(_KEY)
    try:
        found = Receipt(**json.loads(str(said)))
    except (ValueError, TypeError):
        found = Receipt(-1)
    if any(type(n) is not int or n < 0 for n in (found.counted, found.answered)) or type(found.why) is not str:
        raise RecordError(f"the message does not say which of this site's work counted, but {quoted(said, 40)}.")
    return found


__all__ = ["Receipt", "put_receipt", "receipt_of"]
