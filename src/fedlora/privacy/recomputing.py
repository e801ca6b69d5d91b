"""A ledger as an outsider reads it: the file alone, its chain checked, epsilon computed anew."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedlora.errors import LedgerError
from fedlora.privacy import chain
from fedlora.privacy.events import Charged, planned_on, spent_on


@dataclass(frozen=True)
class Recomputed:
    """What an outsider finds in a ledger.

    epsilon: spent, at delta. planned: with all rounds that its runs planned. tip: (number, digest) of the newest line;
    tips: of each. A tip that somebody kept (a card has one) must be among the tips of any later ledger: else lines were
    taken out or changed since.
    """

    population: str
    delta: float
    epsilon: float
    planned: float
    events: tuple[Charged, ...]
    tip: tuple[int, str]
    tips: tuple[tuple[int, str], ...] = ()


def recompute(path: Path, delta: float | None = None) -> Recomputed:
    """Read a ledger: its chain is checked, and epsilon is computed anew from its events.

    Args:
        path: of the file alone; neither its tip nor its place counts. delta: None takes the smallest of its plans.

    Raises:
        LedgerError: it is not there, or damaged. HyperparameterError: dp-accounting is missing.

    Example:
        >>> from fedlora.privacy import recompute
        >>> found = recompute(Path("ledger.jsonl"))
        >>> len(found.events), found.planned > found.epsilon > 0
        (1, True)
    """
    try:
        book = chain.read(Path(path).read_bytes(), str(path))
    except OSError as error:
        raise LedgerError(f"the ledger {path} cannot be read: {error.strerror or error}.") from error
    if book is None:
        raise LedgerError(f"{path} holds no ledger.")
    events = [charged.event for charged in book.charged]
    if delta is None:
        delta = min((event.delta for event in events), default=1e-5)
    return Recomputed(
        book.population, delta, spent_on(events, delta), planned_on(events, delta), book.charged, book.tip, book.tips
    )
