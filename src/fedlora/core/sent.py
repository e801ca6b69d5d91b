"""All uploads of a round, as an omniscient adversary sees them: for experiments with byzantine clients.

The engine takes a `Tamperer`. It sees a round's uploads before the server does, and replaces those of its own clients.
Nothing else in the package takes one.
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
    """One client's upload and what it started from. begun: the complete adapter before training (its readout). roles:
    the round's, which say which parts travel."""

    upload: Upload
    begun: Adapter
    roles: Roles


@dataclass(frozen=True)
class Attacked:
    """What an adversary did in a round. what: the attack in words. clients: each of its clients that took part ->
    numbers about its upload; empty if none took part."""

    what: str
    clients: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, eq=False)
class Tampered:
    """What arrives at the server: one upload for each that was sent, in the same order, and what was done."""

    uploads: Sequence[Upload]
    attacked: Attacked


class Tamperer(Protocol):
    """Byzantine clients together, knowing everyone's uploads. A pure function of its arguments."""

    def __call__(self, sent: Sequence[Sent], round: int) -> Tampered:
        """sent: every client of the round whose training succeeded, in order of arrival. round: from 0."""
