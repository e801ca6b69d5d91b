"""The ledger: spending on a population of clients, in a file that outlives every run.

    ledger = Ledger(Path("hospitals.jsonl"), population="six hospitals, 2026")
    ledger.charge(event, Budget(epsilon=8.0, delta=1e-3))      on disk before it returns, or refused
    ledger.spent(delta=1e-3)

Use one file for all runs on the same people's data, whoever starts them: a second run, a rewound one, each trial of a
hyper-parameter search, and an initial adapter trained on these clients all spend from it. A new file for the same
clients hides past spending; this cannot be detected.

Decisions, and why:
* A charge counts even without a release. The same release (run, round, digest of its bytes) is charged once, so
  resuming is free.
* The budget belongs to the population and is in the file, from the first charge that names one. Changing it is a
  decision of people: `set_budget` writes a line with the reason, and cards report it.
* Each line repeats the digest of the one before (`chain`); `ledger_file` protects the file itself.
* It has no clock: lines are ordered by number (`chain`). People who want a date put it in their reason.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedlora.core.text import quoted
from fedlora.errors import BudgetSpent, LedgerError
from fedlora.privacy import chain
from fedlora.privacy.accounting import epsilon_of, epsilon_up
from fedlora.privacy.chain import Book
from fedlora.privacy.decisions import BudgetSet, Earlier, check_reason
from fedlora.privacy.events import Budget, Charged, Event, spent_on
from fedlora.privacy.ledger_file import LedgerFile
from fedlora.privacy.recomputing import Recomputed, recompute

__all__ = ["Budget", "BudgetSet", "Charged", "Earlier", "Event", "Ledger", "Recomputed", "recompute"]

_SOME_DELTA = 1e-6  # for asking whether any epsilon is finite, if no budget names a delta


class Ledger:
    """Spending on a population of clients. Nothing is cached: each call reads the file.

    Example:
        >>> from pathlib import Path
        >>> from fedlora.privacy import Budget, Event, Ledger, Mechanism
        >>> ledger = Ledger(Path("ledger.jsonl"), population="six sites")
        >>> event = Event.of(Mechanism.of(1.0, 1.0, size=100), 100, run="one", round=1, sampling=1.0, rounds=20,
        ...                  delta=1e-3, released=64 * "0")  # the journal knows the digest
        >>> charged = ledger.charge(event, Budget(epsilon=24.0, delta=1e-3))
        >>> charged.event.round, round(ledger.planned(delta=1e-3), 2)
        (1, 23.06)
    """

    def __init__(self, path: Path, population: str, *, state: Path | None = None) -> None:
        """path: the file; the first charge creates it. population: its name, chosen by the user, permanent. state:
        where to keep what is known about it outside its folder; None: `outside.state_folder`.

        Raises:
            LedgerError: no name.
        """
        if not isinstance(population, str) or not 1 <= len(population) <= 200 or not population.isprintable():
            raise LedgerError(
                f"a population's name must be 1 to 200 printable letters (whose data is it?); got {quoted(population)}."
            )
        self._file = LedgerFile(Path(os.path.realpath(path)), population, state)

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def population(self) -> str:
        return self._file.population

    @property
    def state(self) -> Path | None:
        return self._file.state

    def charge(self, event: Event, budget: Budget | None = None, *, left: bool = False) -> Charged:
        """Write the event: complete, and on disk when this returns. Only then may its release leave.

        Args:
            budget: the caller's own limit, besides the ledger's. The first one named becomes the ledger's. If neither
                exists, nothing limits the charge. left: the release may already have left, so it is charged whatever
                the budgets.

        Raises:
            BudgetSpent: the population would exceed a budget; nothing is charged.
            LedgerError: the file cannot be used; `events` shows whether the event is in it.
        """
        if not event.released:
            raise LedgerError("an event is charged with the digest of its release: `Journal.store` does both.")
        with self._file.opened() as (descriptor, book):
            for other in book.charged:
                if _same(other.event, event):
                    self._file.flush(descriptor, book)  # its own writer may have been killed before flushing
                    return other
            if not left:
                self._require(book, event, budget, 1)
            if budget is not None and not book.budgets:
                first = chain.budget_line(budget, f"named by the run {event.run}", book.tip)
                book = self._file.append(descriptor, book, first)
            line = chain.event_line(event, book.tip)
            self._file.append(descriptor, book, line)
            return Charged(book.tip[0] + 1, chain.digest_of(line), event)

    def charge_earlier(self, earlier: Earlier) -> int:
        """Record what these clients' data were used for outside this ledger, whatever the budget: it has happened.
        Returns the line's number.

        Raises:
            LedgerError: it is already charged, no finite epsilon would be left, or the file cannot be used.
        """
        with self._file.opened() as (descriptor, book):
            if earlier in book.earlier:
                raise LedgerError(
                    f"the ledger {self.path} was already charged with {quoted(earlier.reason)} and these numbers. If "
                    f"that was another training, give another reason."
                )
            delta = book.budget.delta if book.budget else _SOME_DELTA
            together = epsilon_of([*(c.event.spending(1) for c in book.charged), *(e.spending for e in book.earlier),
                                   earlier.spending], delta)  # fmt: skip
            if not math.isfinite(together):
                raise LedgerError(
                    f"with that training no finite epsilon can be computed at delta {delta:g}, and the ledger "
                    f"{self.path} could never pay for another round; nothing was written. Check the noise multiplier "
                    f"({earlier.noise_multiplier:g}), rounds ({earlier.rounds:,}) and sampling ({earlier.sampling:g})."
                )
            return self._file.append(descriptor, book, chain.earlier_line(earlier, book.tip)).tip[0]

    def set_budget(self, budget: Budget, reason: str) -> int:
        """Set what the population may spend in all, from now on: more than before, or less. Returns the line's number.

        Raises:
            LedgerError: no reason, the same budget as now, or the file cannot be used.
        """
        check_reason(reason)
        with self._file.opened() as (descriptor, book):
            if book.budget == budget:
                raise LedgerError(f"the budget of {self.path} is already epsilon {budget.epsilon:g}.")
            return self._file.append(descriptor, book, chain.budget_line(budget, reason, book.tip)).tip[0]

    def adopt(self, reason: str) -> None:
        """Continue with a file that was moved to another disk or machine, or restored from a backup. A line in it
        records this permanently. From then on this user's other copies on this machine are refused. Copies elsewhere
        are unknown here: never use them again, or both spend one budget.

        Raises:
            LedgerError: no reason, or the file is missing, is no copy, is damaged or truncated, or is older than what
                was written.
        """
        check_reason(reason)
        self._file.adopt(reason)

    def check(self, event: Event, budget: Budget | None, rounds: int = 1) -> None:
        """Check before a round or a run; writes nothing. budget: as in `charge`.

        Raises:
            BudgetSpent: with `rounds` more such events the population would exceed a budget.
            LedgerError: the file cannot be used.
        """
        self._require(self._file.read_own(), event, budget, rounds)

    def events(self) -> tuple[Charged, ...]:
        """All charged events; () if the file does not exist. Raises `LedgerError`."""
        book = self._file.read()
        return book.charged if book else ()

    def budget(self) -> Budget | None:
        """The ledger's current budget; None if it has none. Raises `LedgerError`."""
        book = self._file.read()
        return book.budget if book else None

    def spent(self, delta: float) -> float:
        """Epsilon of all events, earlier ones included. Raises `LedgerError`."""
        book = self._file.read()
        return book.spent(delta) if book else 0.0

    def planned(self, delta: float) -> float:
        """Epsilon of everything spent, plus the remaining rounds that runs planned. Raises `LedgerError`."""
        book = self._file.read()
        return book.planned(delta) if book else 0.0

    def describe(self, delta: float) -> Mapping[str, Any]:
        """Plain values for metrics and card, all public. budgets: in order, the newest last. tip: for comparison with a
        later ledger."""
        book = self._file.read()
        return {
            "population": self.population,
            "events": len(book.charged) if book else 0,
            "delta": delta,
            "epsilon": book.spent(delta) if book else 0.0,
            "planned_epsilon": book.planned(delta) if book else 0.0,
            "earlier": [asdict(earlier) for earlier in book.earlier] if book else [],
            "budgets": [budget_facts(found) for found in book.budgets] if book else [],
            "moved": list(book.moves) if book else [],
            "tip": list(book.tip) if book else None,
        }

    def _require(self, book: Book | None, event: Event, own: Budget | None, rounds: int) -> None:
        newest = book.budgets[-1] if book and book.budgets else None
        for budget, of_ledger in ((newest.budget if newest else None, True), (own, False)):
            if budget is None:
                continue
            before = [charged.event for charged in book.charged] if book else []
            earlier = book.earlier if book else ()
            after = spent_on([*before, *[event] * rounds], budget.delta, earlier)
            if after > budget.epsilon:
                also = f", and {len(earlier)} earlier trainings," if earlier else ""
                raise BudgetSpent(
                    f"{rounds} more release{'s' * (rounds > 1)} with noise multiplier {event.noise_multiplier:g} and "
                    f"sampling {event.sampling:g} would bring population {quoted(self.population)} to epsilon "
                    f"{epsilon_up(after)} at delta {budget.delta:g}; the budget is {budget.epsilon:g}, and "
                    f"{len(before)} releases{also} have spent "
                    f"{epsilon_up(spent_on(before, budget.delta, earlier))} of it. {self._advice(newest, of_ledger)}"
                )

    def _advice(self, newest: BudgetSet | None, of_ledger: bool) -> str:
        if of_ledger and newest is not None:
            return (
                f"Line {newest.number} of {self.path.name} set that budget. Plan fewer rounds or more noise; or decide "
                f"that these clients may lose more, and say why, in the ledger and on every card from then on: fedlora "
                f"privacy {self.path.name} --budget EPSILON --delta {newest.budget.delta:g} --because '...'. The past "
                f"cannot be taken back: a new file for the same clients would only hide it."
            )
        return (
            "That is this run's own privacy.budget. Plan fewer rounds or more noise, or set another one. The past "
            "cannot be taken back: a new file for the same clients would only hide it."
        )


def budget_facts(found: BudgetSet) -> dict[str, Any]:
    """A budget as plain values."""
    return {"line": found.number, **asdict(found.budget), "reason": found.reason}


def _same(one: Event, other: Event) -> bool:
    return (one.run, one.round, one.released) == (other.run, other.round, other.released)
