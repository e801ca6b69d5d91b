"""The ledger: what was spent on a population of clients, in one file that outlives every run.

    {"kind": "ledger", "version": 2, "population": ..., "meaning": ...}                          line 0
    {"kind": "event", "number": 1, "before": SHA-256 of line 0, "run": ..., "round": ..., ...}
    {"kind": "budget", "number": 2, "before": SHA-256 of line 1, "epsilon": ..., "delta": ...}
    {"kind": "earlier", "number": 3, "before": ..., "noise_multiplier": ..., "rounds": ..., "sampling": ...}

A line is appended under a lock (flock) and flushed (fsync of file and folder) before its release may leave. A last line
without its end was never finished, so nothing left for it, and the next line overwrites it. A changed, missing or
swapped line breaks the chain, and a broken chain is refused.

A ledger relies on its owners' honesty: a copy, an old backup, lines cut off at the end or a second ledger for the same
clients would spend the same budget again, and nothing here detects it. Whoever kept the digest of a line (summaries
have the newest one) can tell that a later ledger lacks it.

No line has a time. The end of a round reveals its duration, and thereby who was drawn for it; and one run's times would
reveal those of another run in the same file.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fedlora.core import files
from fedlora.core.text import quoted
from fedlora.errors import BudgetSpent, LedgerError
from fedlora.privacy.accounting import Spending, epsilon_up
from fedlora.privacy.events import VERSION, Budget, Event, Recomputed, digest_of, read

_MEANING = (
    "each event is PoissonSampledDpEvent(sampling, GaussianDpEvent(noise_multiplier)) of dp-accounting, sampling = 1 "
    "being the Gaussian alone; neighbours: one client's contribution present or zero; epsilon: PLDAccountant("
    "ADD_OR_REMOVE_ONE), all events composed; a line of kind earlier is `rounds` such events, made elsewhere"
)
_SOME_DELTA = 1e-6  # for asking whether any epsilon is finite, if no budget names a delta


class Ledger:
    """Spending on a population of clients. Nothing is cached: each call reads the file.

    Use one file for all runs on the same people's data, whoever starts them: a second run, a rewound one, each trial of
    a search, and an initial adapter trained on these clients all spend from it.

    Example:
        >>> from pathlib import Path
        >>> from fedlora.privacy import Budget, Event, Ledger, Mechanism
        >>> ledger = Ledger(Path("ledger.jsonl"), population="six sites")
        >>> event = Event.of(Mechanism.of(1.0, 1.0, size=100), 100, run="one", round=1, sampling=1.0, rounds=20,
        ...                  delta=1e-3, released=64 * "0")  # the journal knows the digest
        >>> ledger.charge(event, Budget(epsilon=24.0, delta=1e-3))
        >>> round(ledger.read(delta=1e-3).planned, 2)
        23.06
    """

    def __init__(self, path: Path, population: str) -> None:
        """path: the file; the first charge creates it. population: its name, chosen by the user, permanent.

        Raises:
            LedgerError: no name.
        """
        if not isinstance(population, str) or not 1 <= len(population) <= 200 or not population.isprintable():
            raise LedgerError(
                f"a population's name must be 1 to 200 printable letters (whose data is it?); got {quoted(population)}."
            )
        self.path, self.population = Path(os.path.realpath(path)), population

    def charge(self, event: Event, budget: Budget | None = None) -> None:
        """Write the event: complete, and on disk when this returns. Only then may its release leave. The same release
        (run, round, digest of its bytes) is charged once, so resuming is free.

        Args:
            budget: the caller's own limit, besides the ledger's. The first one named becomes the ledger's. If neither
                exists, nothing limits the charge.

        Raises:
            BudgetSpent: the population would exceed a budget; nothing is charged.
            LedgerError: the file cannot be used; `read` shows whether the event is in it.
        """
        if not event.released:
            raise LedgerError("an event is charged with the digest of its release: `Journal.store` does both.")
        with self._opened() as (descriptor, book):
            if any((e.run, e.round, e.released) == (event.run, event.round, event.released) for e in book.events):
                self._flush(descriptor)  # its writer may have been killed before flushing
                return
            self._require(book, event, budget, 1)
            if budget is not None and not book.budgets:
                book = replace(book, newest=self._append(descriptor, book, "budget", budget))
            self._append(descriptor, book, "event", event)

    def charge_earlier(self, earlier: Spending) -> None:
        """Record releases made from these clients' data outside this ledger, whatever the budget: they have happened.
        An adapter to start from, say, or trials elsewhere.

        Raises:
            LedgerError: no finite epsilon would be left, or the file cannot be used.
        """
        with self._opened() as (descriptor, book):
            delta = book.budgets[-1].delta if book.budgets else _SOME_DELTA
            if earlier.rounds < 1 or not math.isfinite(replace(book, delta=delta).with_more([earlier])):
                raise LedgerError(
                    f"{earlier.rounds:,} releases of noise multiplier {earlier.noise_multiplier:g} and sampling "
                    f"{earlier.sampling:g} leave no finite epsilon at delta {delta:g}; nothing was written. An "
                    f"adapter that these clients trained without noise cannot start a private run."
                )
            self._append(descriptor, book, "earlier", earlier)

    def set_budget(self, budget: Budget) -> None:
        """Set what the population may spend in all, from now on: more than before, or less. Raises `LedgerError`."""
        with self._opened() as (descriptor, book):
            self._append(descriptor, book, "budget", budget)

    def check(self, event: Event, budget: Budget | None, rounds: int = 1) -> None:
        """Check before a round or a run; writes nothing. budget: as in `charge`.

        Raises:
            BudgetSpent: with `rounds` more such events the population would exceed a budget.
            LedgerError: the file cannot be used.
        """
        self._require(self.read(), event, budget, rounds)

    def read(self, delta: float | None = None) -> Recomputed:
        """All lines, read without the lock: they only grow. delta: None takes the smallest of its plans.

        Raises:
            LedgerError: it cannot be read, is damaged, or belongs to another population.
        """
        found = read(self.path, delta)
        if found.end and found.population != self.population:
            raise LedgerError(
                f"the ledger {self.path} belongs to the population {quoted(found.population)}, not "
                f"{quoted(self.population)}. Give each population its own file, and all runs on its clients the same "
                f"one."
            )
        return found

    def describe(self, delta: float) -> Mapping[str, Any]:
        """Plain values for metrics and card, all public. budgets: in order. newest: (number, digest) of the last line,
        for comparison with a later ledger."""
        book = self.read(delta)
        return {
            "population": self.population, "events": len(book.events), "delta": delta, "epsilon": book.epsilon,
            "planned_epsilon": book.planned, "earlier": [asdict(one) for one in book.earlier],
            "budgets": [asdict(budget) for budget in book.budgets], "newest": list(book.newest),
        }  # fmt: skip

    def _require(self, book: Recomputed, event: Event, own: Budget | None, rounds: int) -> None:
        limits = [(budget, f"the budget of {self.path.name}") for budget in book.budgets[-1:]]
        if own is not None:
            limits.append((own, "this run's own privacy.budget"))
        for budget, whose in limits:
            at = replace(book, delta=budget.delta)
            after = at.with_more([event.spending(rounds)])
            if after > budget.epsilon:
                raise BudgetSpent(
                    f"{rounds} more release{'s' * (rounds > 1)} with noise multiplier {event.noise_multiplier:g} and "
                    f"sampling {event.sampling:g} would bring population {quoted(self.population)} to epsilon "
                    f"{epsilon_up(after)} at delta {budget.delta:g}; {whose} is {budget.epsilon:g}, and "
                    f"{epsilon_up(at.epsilon)} of it is spent. Plan fewer rounds or more noise, or set "
                    f"another budget (fedlora privacy {self.path.name} --budget EPSILON). A new file for the same "
                    f"clients would only hide the past."
                )

    @contextmanager
    def _opened(self) -> Iterator[tuple[int, Recomputed]]:
        """The file, locked, and its lines; begun if it is new. Raises `LedgerError`."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                try:
                    yield descriptor, self._locked(descriptor)
                finally:
                    fcntl.flock(descriptor, fcntl.LOCK_UN)  # even if a forked child still has it open
            finally:
                os.close(descriptor)
        except OSError as error:
            raise LedgerError(
                f"the ledger {self.path} cannot be used (it needs a local disk with file locks): "
                f"{error.strerror or error}."
            ) from error

    def _locked(self, descriptor: int) -> Recomputed:
        book = self.read()
        if not os.path.samestat(os.fstat(descriptor), self.path.stat()):
            raise LedgerError(f"{self.path} was replaced meanwhile. Nothing was charged.")
        if book.end:
            os.ftruncate(descriptor, book.end)  # drops a killed writer's torn line
            return book
        header = _line({"kind": "ledger", "version": VERSION, "population": self.population, "meaning": _MEANING})
        self._put(descriptor, header, 0)
        return self.read()

    def _append(self, descriptor: int, book: Recomputed, kind: str, content: Any) -> tuple[int, str]:
        """Append a line durably, or leave the file as it was. Returns its number and digest."""
        number, before = book.newest
        line = _line({"kind": kind, "number": number + 1, "before": before, **asdict(content)})
        self._put(descriptor, line, os.fstat(descriptor).st_size)
        return number + 1, digest_of(line)

    def _put(self, descriptor: int, line: bytes, at: int) -> None:
        try:
            written = 0
            while written < len(line):
                written += os.pwrite(descriptor, line[written:], at + written)
            self._flush(descriptor)
        except OSError:
            os.ftruncate(descriptor, at)
            raise

    def _flush(self, descriptor: int) -> None:
        os.fsync(descriptor)
        files.sync_folder(self.path.parent)


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, allow_nan=False).encode() + b"\n"
