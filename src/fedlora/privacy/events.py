"""A release as the ledger records it, and the cost of many releases. All of it is public."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

from fedlora.core.text import quoted
from fedlora.errors import HyperparameterError, LedgerError
from fedlora.privacy.accounting import MOST_ROUNDS, Spending, check_delta, epsilon_of
from fedlora.privacy.mechanism import Mechanism

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Event:
    """One release, as charged.

    Args:
        run: the run's id, up to 100 printable letters. round: from 1.
        sampling: q. noise_multiplier: z.
        clip, grid, size, sensitivity: the mechanism's, for vectors of d = size entries. They determine what was done; q
            and z alone determine the cost.
        rounds: T, the run's planned number. delta: its plan's.
        released: SHA-256 of the journal's bytes, which hold the noised sum. The journal sets it.

    Raises:
        HyperparameterError: impossible values, a sensitivity other than the mechanism's, or a grid too coarse for
            epsilon to hold.
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
        if not isinstance(self.run, str) or not 1 <= len(self.run) <= 100 or not self.run.isprintable():
            raise HyperparameterError(f"a run's id must be 1 to 100 printable letters; got {quoted(self.run)}.")
        for name in ("round", "rounds"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_ROUNDS:
                raise HyperparameterError(
                    f"privacy: an event's {name} must be a whole number from 1 to {MOST_ROUNDS:,}; got {quoted(value)}."
                )
        if not isinstance(self.released, str) or (self.released and not _DIGEST.fullmatch(self.released)):
            raise HyperparameterError(f"an event's digest must be 64 hexadecimal letters; got {quoted(self.released)}.")
        check_delta(self.delta)
        self.spending(1)
        if self.noise_multiplier == 0:
            raise HyperparameterError("privacy: a release without noise (noise_multiplier 0) has no finite epsilon.")
        mechanism = Mechanism(self.clip, self.noise_multiplier, self.grid)
        mechanism.check_room(self.size, 1)
        if self.sensitivity != mechanism.sensitivity(self.size):
            raise HyperparameterError(
                f"privacy: the sensitivity of clip {self.clip:g} on the grid {self.grid:g} with {self.size} entries is "
                f"{mechanism.sensitivity(self.size)!r}; the event says {self.sensitivity!r}."
            )

    @classmethod
    def of(
        cls,
        mechanism: Mechanism,
        size: int,
        *,
        run: str,
        round: int,
        sampling: float,
        rounds: int,
        delta: float,
        released: str = "",
    ) -> Event:
        """The event for one noised sum by that mechanism, over vectors of `size` entries."""
        return cls(
            run, round, sampling, mechanism.noise_multiplier, mechanism.clip, mechanism.grid, size,
            mechanism.sensitivity(size), rounds, delta, released,
        )  # fmt: skip

    def spending(self, rounds: int) -> Spending:
        """This many releases of this kind."""
        return Spending(self.noise_multiplier, rounds, self.sampling)

    def plain(self) -> dict[str, Any]:
        """Its fields by name, as JSON values."""
        return asdict(self)

    @classmethod
    def from_plain(cls, found: dict[str, Any]) -> Event:
        """The inverse of `plain`. Raises `LedgerError` for anything else."""
        names = [field.name for field in fields(cls)]
        if sorted(found) != sorted(names):
            raise LedgerError(f"an event has the fields {', '.join(names)}; found {quoted(sorted(found))}.")
        try:
            return cls(**found)
        except (HyperparameterError, TypeError, OverflowError) as error:
            raise LedgerError(f"an impossible event: {error}") from error


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
        if not isinstance(self.epsilon, int | float) or not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise HyperparameterError(f"privacy: a budget's epsilon must be positive and finite; got {self.epsilon!r}.")


@dataclass(frozen=True)
class Charged:
    """An event in its ledger. number: its line's, from 1. digest: its line's, repeated in the next line."""

    number: int
    digest: str
    event: Event


class Before(Protocol):
    """Something spent before: `decisions.Earlier`."""

    @property
    def spending(self) -> Spending: ...


def spent_on(events: Iterable[Event], delta: float, earlier: Iterable[Before] = ()) -> float:
    """Epsilon of all of them. Each counts, even two for one round."""
    return epsilon_of([*(event.spending(1) for event in events), *(one.spending for one in earlier)], delta)


def planned_on(events: Iterable[Event], delta: float, earlier: Iterable[Before] = ()) -> float:
    """Epsilon of all of them plus the remaining rounds that their runs planned. Cards state this, since whether a run
    stops early may depend on its data."""
    by_run: dict[str, list[Event]] = {}
    for event in events:
        by_run.setdefault(event.run, []).append(event)
    spendings = [one.spending for one in earlier]
    for of_run in by_run.values():
        spendings += [event.spending(1) for event in of_run]
        left = max(event.rounds for event in of_run) - len({event.round for event in of_run})
        spendings.append(of_run[-1].spending(max(left, 0)))
    return epsilon_of(spendings, delta)
