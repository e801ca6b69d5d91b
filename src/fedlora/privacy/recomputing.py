"""A ledger as an outsider reads it: the file alone, its chain checked, epsilon computed anew."""

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
    """What an outsider finds in a ledger.

    epsilon: spent, at delta, earlier trainings included. planned: with all rounds that its runs planned. earlier,
    budgets, moves: what people decided, and why. tip: (number, digest) of the newest line; tips: of each. A tip that
    somebody kept (a card has one) must be among the tips of any later ledger: else lines were taken out or changed
    since.
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
    has_tip: bool = False  # NAME.tip lay beside it and is in it, so that no line was cut off


def recompute(path: Path, delta: float | None = None) -> Recomputed:
    """Read a ledger: its chain is checked, and epsilon is computed anew from its events.

    Args:
        path: of the file. Its place does not count; a tip beside it must be in it, as charging asks.
        delta: None takes the smallest of its plans.

    Raises:
        LedgerError: it is not there, or damaged, or cut off behind its tip.
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
