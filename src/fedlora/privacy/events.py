"""A ledger's lines: releases, and the budget that limits them; and what all lines together say. All of it is public."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedlora.core.text import quoted
from fedlora.errors import HyperparameterError, LedgerError
from fedlora.given_files import read_given
from fedlora.privacy.accounting import LEAST_DELTA, Spending, check_delta, epsilon_of
from fedlora.privacy.mechanism import Mechanism

VERSION = 2  # of a ledger
_BEGINNING = b'{"kind": "ledger", '
_LARGEST = 2**28  # bytes; a hundred thousand rounds take a third of it


@dataclass(frozen=True)
class Event:
    """One release, as charged.

    Args:
        run: the run's id. round: from 1.
        sampling: q. noise_multiplier: z.
        clip, grid, size, sensitivity: the mechanism's, for vectors of d = size entries. They determine what was done; q
            and z alone determine the cost.
        rounds: T, the run's planned number. delta: its plan's.
        released: SHA-256 of the journal's bytes, which hold the noised sum. The journal sets it.

    Raises:
        HyperparameterError: impossible numbers, or a grid too coarse for epsilon to hold.
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

    def __post_init__(self) -> None:
        if not isinstance(self.run, str) or not isinstance(self.round, int) or not isinstance(self.released, str):
            raise HyperparameterError("privacy: an event's run and digest are texts, and its round is a whole number.")
        check_delta(self.delta)
        self.spending(self.rounds)
        Mechanism(self.clip, self.noise_multiplier, self.grid).check_room(self.size, 1)

    @classmethod
    def of(cls, mechanism: Mechanism, size: int, **plan: Any) -> Event:
        """The event for one noised sum by that mechanism, over vectors of `size` entries. plan: run, round, sampling,
        rounds, delta, and the digest `released` if it is known."""
        return cls(**asdict(mechanism), size=size, sensitivity=mechanism.sensitivity(size), **plan)

    def spending(self, rounds: int) -> Spending:
        """This many releases of this kind."""
        return Spending(self.noise_multiplier, rounds, self.sampling)


@dataclass(frozen=True)
class Budget:
    """The most that may be spent on the population, over all its runs.

    Raises:
        HyperparameterError: epsilon is not positive, or delta is impossible.
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        check_delta(self.delta)
        if not 0 < self.epsilon < math.inf:
            raise HyperparameterError(f"privacy: a budget's epsilon must be positive and finite; got {self.epsilon!r}.")


@dataclass(frozen=True)
class Recomputed:
    """What a ledger says: its chain verified, epsilon computed anew from its lines.

    delta: for `epsilon` and `planned`. earlier: releases made elsewhere. budgets: in order; the last one holds. newest:
    (number, digest) of the last line. end: of the complete lines, in bytes; 0: there is none yet.
    """

    population: str
    delta: float
    events: tuple[Event, ...] = ()
    earlier: tuple[Spending, ...] = ()
    budgets: tuple[Budget, ...] = ()
    newest: tuple[int, str] = (0, "")
    end: int = 0

    @property
    def epsilon(self) -> float:
        """Epsilon of all lines."""
        return self.with_more(())

    @property
    def planned(self) -> float:
        """Epsilon of all lines plus the remaining rounds that their runs planned. Cards state this, since whether a run
        stops early may depend on its data."""
        runs: dict[str, list[Event]] = {}
        for event in self.events:
            runs.setdefault(event.run, []).append(event)
        left = {run: max(e.rounds for e in of) - len({e.round for e in of}) for run, of in runs.items()}
        return self.with_more(runs[run][-1].spending(max(rounds, 0)) for run, rounds in left.items())

    def with_more(self, more: Iterable[Spending]) -> float:
        """Epsilon of all lines and of these releases. Each event counts, even two for one round."""
        return epsilon_of([*(event.spending(1) for event in self.events), *self.earlier, *more], self.delta)


def recompute(path: Path, delta: float | None = None) -> Recomputed:
    """Read a ledger, verify its chain, and recompute epsilon from its events.

    Args:
        path: the file. delta: None takes the smallest of its plans.

    Raises:
        LedgerError: it is missing or damaged. HyperparameterError: dp-accounting is missing.

    Example:
        >>> from fedlora.privacy import recompute
        >>> found = recompute(Path("ledger.jsonl"))
        >>> len(found.events), found.planned > found.epsilon > 0
        (1, True)
    """
    found = read(Path(path), delta)
    if not found.end:
        raise LedgerError(f"{path} does not exist, or holds no ledger.")
    return found


def read(path: Path, delta: float | None = None) -> Recomputed:
    """A ledger's complete lines; a last one without its end was never finished. Without a complete line: no population,
    nothing spent.

    Raises:
        LedgerError: it cannot be read; a line is not a ledger's, or does not follow from the one before.
    """
    try:
        raw = read_given(path, _LARGEST)
    except FileNotFoundError:
        raw = b""
    except OSError as error:
        raise LedgerError(f"the ledger {path} cannot be read: {error.strerror or error}.") from error
    end = raw.rfind(b"\n") + 1
    if not _BEGINNING.startswith(raw[: len(_BEGINNING)]):  # a torn header is as good as none
        raise LedgerError(f"{path} holds no ledger. Name the population's own, or a new file.")
    if not end:
        return Recomputed("", delta or LEAST_DELTA)
    first, *lines = raw[: end - 1].split(b"\n")
    header = _table(first, path, 0)
    population = header.get("population")
    if header.get("version") != VERSION or not isinstance(population, str):
        raise LedgerError(
            f"{path} is a ledger of version {quoted(header.get('version'))}, and this fedlora reads version {VERSION}. "
            f"Begin a new one, and charge what that one says (fedlora privacy NEW --charge ...)."
        )
    newest, events, earlier, budgets = (0, digest_of(first)), list[Event](), list[Spending](), list[Budget]()
    for number, line in enumerate(lines, start=1):
        found = _table(line, path, number)
        if (found.pop("number", None), found.pop("before", None)) != (number, newest[1]):
            raise LedgerError(
                f"{path} was changed: line {number} does not follow from line {number - 1} (each line repeats the "
                f"digest of the one before). Restore the original ledger: this one does not show what was spent."
            )
        newest = number, digest_of(line)
        try:
            match found.pop("kind", None):
                case "event":
                    events.append(Event(**found))
                case "earlier":
                    earlier.append(Spending(**found))
                case "budget":
                    budgets.append(Budget(**found))
                case kind:
                    raise ValueError(f"it has an unknown kind {quoted(kind)}.")
        except (ValueError, TypeError, OverflowError) as error:
            raise LedgerError(f"{path}, line {number}: {error}") from error
    delta = delta or min([*(event.delta for event in events), *(budget.delta for budget in budgets)], default=1e-5)
    return Recomputed(population, delta, tuple(events), tuple(earlier), tuple(budgets), newest, end)


def digest_of(line: bytes) -> str:
    """SHA-256 of a line without its end."""
    return hashlib.sha256(line.rstrip(b"\n")).hexdigest()


def _table(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        found = json.loads(line)
        if not isinstance(found, dict):
            raise ValueError("not a table")
    except (ValueError, RecursionError) as error:
        raise LedgerError(f"{path} is damaged: line {number} is no table of JSON ({type(error).__name__}).") from error
    return found
