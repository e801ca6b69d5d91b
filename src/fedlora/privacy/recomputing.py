"""Reads a ledger as an outsider: the file alone, its chain verified, epsilon recomputed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedlora.errors import LedgerError
from fedlora.given_files import read_given
from fedlora.privacy import chain
from fedlora.privacy.decisions import BudgetSet, Earlier
from fedlora.privacy.events import Charged
from fedlora.privacy.ledger_file import LedgerFile
from fedlora.privacy.locked_file import LARGEST


@dataclass(frozen=True)
class Recomputed:
    """An outsider's findings in a ledger.

    epsilon: spent, at delta, including earlier trainings. planned: including all rounds that its runs planned. earlier,
    budgets, moves: people's decisions, with reasons. tip: (number, digest) of the newest line; tips: of each line. A
    tip that somebody kept (cards show one) must be among the tips of any later ledger; otherwise lines were removed or
    changed since.
    """

    population: str
    delta: float
    epsilon: float
    planned: float
    events: tuple[Charged, ...]
    earlier: tuple[Earlier, ...]
    budgets: tuple[BudgetSet, ...]
    moves: tuple[str, ...]
    tip: tuple[int, str]
    tips: tuple[tuple[int, str], ...] = ()
    has_tip: bool = False  # NAME.tip is beside it and matches a line, so nothing was cut off


def recompute(path: Path, delta: float | None = None) -> Recomputed:
    """Read a ledger, verify its chain, and recompute epsilon from its events.

    Args:
        path: the file. Its location does not matter; a tip beside it must match a line, as for charging.
        delta: None takes the smallest of its plans.

    Raises:
        LedgerError: it is missing, damaged, or cut off behind its tip.
        HyperparameterError: dp-accounting is missing.

    Example:
        >>> from fedlora.privacy import recompute
        >>> found = recompute(Path("ledger.jsonl"))
        >>> len(found.events), found.planned > found.epsilon > 0
        (1, True)
    """
    try:
        book = chain.read(read_given(Path(path), LARGEST), str(path))
    except OSError as error:
        raise LedgerError(f"the ledger {path} cannot be read: {error.strerror or error}.") from error
    if book is None:
        raise LedgerError(f"{path} holds no ledger.")
    file = LedgerFile(Path(path), book.population)
    file.read()
    if delta is None:
        deltas = [*(charged.event.delta for charged in book.charged), *(b.budget.delta for b in book.budgets)]
        delta = min(deltas, default=1e-5)
    return Recomputed(
        book.population, delta, book.spent(delta), book.planned(delta), book.charged, book.earlier, book.budgets,
        book.moves, book.tip, book.tips, file.tip_path.exists(),
    )  # fmt: skip
