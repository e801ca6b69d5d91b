"""Stub: see the docstrings. The real one replaces it with the same signatures."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from fedlora.privacy.ledger import Budget, Charged, Event, Ledger


class Journal:
    """The noised sums of one run, each written whole and charged before it leaves. folder: RUN/journal."""

    def __init__(self, folder: Path, ledger: Ledger, budget: Budget | None = None) -> None:
        raise NotImplementedError

    def stored(self, round: int, context: str = "") -> Tensor | None:
        """The noised sum of that round (int64 (d,)), charged by now; None where none was written. Ask this before a
        round is played: where it answers, nobody trains and no noise is drawn. context: a digest of what the round
        starts from (state, bases, configuration); another one is refused. Raises `LedgerError`, `BudgetSpent`."""
        raise NotImplementedError

    def store(self, round: int, released: Tensor, event: Event, context: str = "") -> Tensor:
        """Write, then charge; only then may `released` leave. Returns what may leave: read back from the file.
        event.released is set here. Raises `LedgerError` where the round has another sum already, `BudgetSpent`."""
        raise NotImplementedError

    def charged(self) -> dict[int, Charged]:
        """Round -> its event in the ledger, of this journal's rounds."""
        raise NotImplementedError
