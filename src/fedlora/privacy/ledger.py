"""Stub: see the docstrings. The real one replaces it with the same signatures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Event:
    """One release, as it is charged. All of it is public.

    run: an id of the run, of letters that print. round: from 1. sampling: q. noise_multiplier: z. clip, grid, size,
    sensitivity: of the mechanism, with d = size. rounds: the planned T of the run. delta: of its plan. released: SHA-256
    of the journal's bytes (set by the journal).
    """

    run: str
    round: int
    sampling: float
    noise_multiplier: float
    clip: float
    grid: float
    size: int
    sensitivity: float
    rounds: int
    delta: float
    released: str = ""


@dataclass(frozen=True)
class Budget:
    """Most that may be spent on the population: (epsilon, delta)."""

    epsilon: float
    delta: float


@dataclass(frozen=True)
class Charged:
    """An event in its ledger. number: from 1. time: UTC, for people only. digest: of the ledger's line."""

    number: int
    time: str
    digest: str
    event: Event


@dataclass(frozen=True)
class Recomputed:
    """What an outsider finds in a ledger. epsilon: spent, at delta. planned: with all rounds that its runs planned.
    tip: (number, digest) of the newest line; an earlier tip that somebody kept must be in any later ledger."""

    population: str
    delta: float
    epsilon: float
    planned: float
    events: tuple[Charged, ...]
    tip: tuple[int, str]


class Ledger:
    """What was spent on a population of clients: a JSON-lines file. One file for all runs on these clients."""

    def __init__(self, path: Path, population: str) -> None:
        """population: its name, as the user chose it; made on the first charge where the file does not exist."""
        raise NotImplementedError

    def charge(self, event: Event, budget: Budget | None = None) -> Charged:
        """Write the event, whole and on the disk before this returns. The same release (run, round, digest) again is
        charged once. Raises `BudgetSpent`, `LedgerError`; nothing is written then."""
        raise NotImplementedError

    def check(self, event: Event, budget: Budget | None, rounds: int = 1) -> None:
        """Raises `BudgetSpent` where `rounds` such events more would pass the budget. Writes nothing."""
        raise NotImplementedError

    def events(self) -> tuple[Charged, ...]:
        """All that was charged; () where the file does not exist."""
        raise NotImplementedError

    def spent(self, delta: float) -> float:
        """Epsilon of all events."""
        raise NotImplementedError

    def planned(self, delta: float) -> float:
        """Epsilon of all events and of the rounds that their runs planned and have not played."""
        raise NotImplementedError

    def describe(self, delta: float) -> Mapping[str, Any]:
        """Plain values for metrics and card: population, events, epsilon, delta, planned, tip."""
        raise NotImplementedError

    def adopt(self, reason: str) -> None:
        """Go on with a file that is a copy or was moved to another disk; a line says so for ever."""
        raise NotImplementedError


def recompute(path: Path, delta: float | None = None) -> Recomputed:
    """Read a ledger as an outsider: its chain is checked and epsilon is computed anew. delta: None takes the smallest
    that its plans have. Raises `LedgerError`."""
    raise NotImplementedError
