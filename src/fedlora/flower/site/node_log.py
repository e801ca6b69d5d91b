"""What a SuperNode's log says, as values: lines of flwr 1.41, which says it in words only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "online", "round", "came through", "not sent", "not received", "lost", "back", "exit", "code", "app", "broken off"
]
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LINES: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("online", re.compile(r"SuperNode ID: (\d+)")),
    ("round", re.compile(r"\[RUN \d+, ROUND ([^\]]+)\]")),
    ("came through", re.compile(r"((?:Sent|Received) successfully)")),
    ("not sent", re.compile(r"Failed to send message \S+: (.*)")),
    ("not received", re.compile(r"Failed to receive message \S+: (.*)")),
    ("lost", re.compile(r"Connection attempt failed, retrying in ([\d.]+) seconds")),
    ("back", re.compile(r"Connection successful after ([\d.]+) seconds")),
    ("exit", re.compile(r"Exit Code: (\d+)")),
    ("code", re.compile(r"\[code: (\d+)\]")),
    ("app", re.compile(r"fedlora: app refused: (.*)")),
    ("broken off", re.compile(r"fedlora: (.*)")),
)


@dataclass(frozen=True)
class Said:
    """kind: what happened. what: a number or words about it."""

    kind: Kind
    what: str


def said(line: str) -> Said | None:
    """What a line tells; None where it is of no interest here.

    Example:
        >>> said("INFO :      SuperNode ID: 42")
        Said(kind='online', what='42')
    """
    plain = _ANSI.sub("", line)
    for kind, pattern in _LINES:
        found = pattern.search(plain)
        if found is not None:
            return Said(kind, found[1].strip())
    return None


def round_of(group: str) -> str:
    """The round of a message's group, as the server names it: RUN-ROUND-ATTEMPT, or RUN-ROUND-measure-PART.

    Example:
        >>> round_of("fed-4f21c0-3-0"), round_of("fed-4f21c0-3-measure-test")
        ('3', '3')
    """
    found = re.search(r"-(\d+)-(?:\d+|measure-\w+)$", group)
    return found[1] if found is not None else group


__all__ = ["Kind", "Said", "round_of", "said"]
