"""People's decisions about a population, written into its ledger with reasons: spending elsewhere, the budget, and
moves of the file. All of it is public and permanent.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedlora.core.text import quoted
from fedlora.errors import HyperparameterError, LedgerError
from fedlora.privacy.accounting import LEAST_NOISE, Spending
from fedlora.privacy.events import Budget

MOST_LETTERS = 500


@dataclass(frozen=True)
class Earlier:
    """Releases made from these clients' data outside this ledger: an adapter trained before, trials elsewhere.

    Args:
        reason: which training it was. noise_multiplier, rounds, sampling: its z, T and q, with one client as the unit.

    Raises:
        HyperparameterError: impossible numbers, or too little noise for a finite epsilon. LedgerError: no reason.

    Example:
        >>> ledger = Ledger(Path("hospitals.jsonl"), population="six hospitals")
        >>> line = ledger.charge_earlier(Earlier("the adapter of 2025, where we start from", 1.0, rounds=20))
        >>> line, round(ledger.spent(delta=1e-3), 2)
        (1, 23.06)
    """

    reason: str
    noise_multiplier: float
    rounds: int
    sampling: float = 1.0

    def __post_init__(self) -> None:
        check_reason(self.reason)
        if self.spending.rounds < 1:
            raise HyperparameterError("privacy: an earlier training must have rounds; got 0.")
        if self.noise_multiplier < LEAST_NOISE:
            raise HyperparameterError(
                f"privacy: a training with noise multiplier {self.noise_multiplier:g} has no finite epsilon, and no "
                f"ledger can pay for it afterwards. An adapter that these clients trained without noise cannot start a "
                f"private run: start from one that never saw their data."
            )

    @property
    def spending(self) -> Spending:
        return Spending(self.noise_multiplier, self.rounds, self.sampling)


@dataclass(frozen=True)
class BudgetSet:
    """A population's budget, set in line `number`."""

    number: int
    budget: Budget
    reason: str


def check_reason(reason: str) -> None:
    """Raise `LedgerError` unless it is one line of readable text."""
    sound = isinstance(reason, str) and reason.strip() and reason.isprintable() and len(reason) <= MOST_LETTERS
    if not sound:
        raise LedgerError(
            f"say in a few words why, on one line of at most {MOST_LETTERS} letters: the reason stays in the ledger, "
            f"where everybody can read it; got {quoted(reason)}."
        )
