"""What a round's clients send, seen by one who knows everything: for experiments with clients that lie.

A `Tamperer` is handed to the engine. It sees all uploads of a round before the server does, and says what arrives in
the place of those of its own clients. Nothing else in the package takes one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fedlora.core.lora import Adapter
from fedlora.core.messages import Upload
from fedlora.core.method import Roles


@dataclass(frozen=True, eq=False)
class Sent:
    """One client's upload beside what it began from. begun: the complete adapter before training, its readout. roles:
    of the round, which say what of it travels."""

    upload: Upload
    begun: Adapter
    roles: Roles


@dataclass(frozen=True)
class Attacked:
    """What an adversary did in a round. what: the attack in words. clients: each client of its own that took part ->
    numbers about its upload; empty where none took part."""

    what: str
    clients: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, eq=False)
class Tampered:
    """What arrives at the server: an upload for each that was sent, in the same order, and what was done."""

    uploads: Sequence[Upload]
    attacked: Attacked


class Tamperer(Protocol):
    """Clients that lie together, knowing all that others send. A pure function of its arguments."""

    def __call__(self, sent: Sequence[Sent], round: int) -> Tampered:
        """sent: of all clients of the round whose training went well, in the order they came in. round: from 0."""
