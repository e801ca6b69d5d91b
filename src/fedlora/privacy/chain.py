"""The ledger's bytes: lines of JSON, each with the previous line's digest. Pure functions that touch no file.

    {"kind": "ledger", "population": ..., "id": ..., "mark": ..., ...}       line 0
    {"kind": "event", "number": 1, "before": SHA-256 of line 0, ...}
    {"kind": "earlier", "number": 2, "before": SHA-256 of line 1, "noise_multiplier": ..., "rounds": ..., ...}
    {"kind": "budget", "number": 3, ..., "epsilon": ..., "delta": ..., "reason": ...}
    {"kind": "moved", "number": 4, ..., "mark": ..., "reason": ...}

A changed, missing or swapped line breaks the chain. Truncation at the end does not, but the tip reveals it, a small
file beside the ledger with the newest number and digest. If somebody rewrites ledger and tip together, only an outsider
who kept an earlier tip (runs' cards show it) can tell: a ledger relies on its owners' honesty.

No line has a time. The end of a round reveals its duration, and thereby who was drawn for it; and one run's times would
reveal those of another run in the same file.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from fedlora.core.text import quoted
from fedlora.errors import HyperparameterError, LedgerError
from fedlora.privacy.decisions import BudgetSet, Earlier, check_reason
from fedlora.privacy.events import Budget, Charged, Event, planned_on, spent_on

VERSION = 1
MEANING = (
    "each event is PoissonSampledDpEvent(sampling, GaussianDpEvent(noise_multiplier)) of dp-accounting, sampling = 1 "
    "being the Gaussian alone; neighbours: one client's contribution present or zero; epsilon: PLDAccountant("
    "ADD_OR_REMOVE_ONE), all events composed; a line of kind earlier is `rounds` such events, made elsewhere"
)
Tip = tuple[int, str]


@dataclass(frozen=True)
class Book:
    """A ledger as read. length: of its complete lines, in bytes; torn: bytes after these of an interrupted write. tips:
    each line's (number, digest). budgets: in order, the newest last. moves: the reasons for each adoption of another
    file. mark: of the one file that may be continued (`outside`)."""

    population: str
    id: str
    mark: str
    charged: tuple[Charged, ...]
    earlier: tuple[Earlier, ...]
    budgets: tuple[BudgetSet, ...]
    moves: tuple[str, ...]
    tips: tuple[Tip, ...]
    length: int
    torn: int

    @property
    def budget(self) -> Budget | None:
        return self.budgets[-1].budget if self.budgets else None

    def spent(self, delta: float) -> float:
        return spent_on([charged.event for charged in self.charged], delta, self.earlier)

    def planned(self, delta: float) -> float:
        return planned_on([charged.event for charged in self.charged], delta, self.earlier)

    @property
    def tip(self) -> Tip:
        return self.tips[-1]


def line_of(content: dict[str, Any]) -> bytes:
    """One line including its end. Raises `ValueError` for NaN."""
    return json.dumps(content, sort_keys=True, allow_nan=False).encode() + b"\n"


def digest_of(line: bytes) -> str:
    """SHA-256 of a line without its end."""
    return hashlib.sha256(line.rstrip(b"\n")).hexdigest()


def header(population: str, id: str, mark: str) -> bytes:
    found = {"kind": "ledger", "version": VERSION, "population": population, "id": id, "mark": mark}
    return line_of(found | {"meaning": MEANING})


def event_line(event: Event, after: Tip) -> bytes:
    return line_of({"kind": "event", "number": after[0] + 1, "before": after[1], **event.plain()})


def earlier_line(earlier: Earlier, after: Tip) -> bytes:
    return line_of({"kind": "earlier", "number": after[0] + 1, "before": after[1], **asdict(earlier)})


def budget_line(budget: Budget, reason: str, after: Tip) -> bytes:
    found = {"kind": "budget", "number": after[0] + 1, "before": after[1]}
    return line_of(found | {**asdict(budget), "reason": reason})


def moved_line(mark: str, reason: str, after: Tip) -> bytes:
    found = {"kind": "moved", "number": after[0] + 1, "before": after[1]}
    return line_of(found | {"mark": mark, "reason": reason})


def read(raw: bytes, name: str) -> Book | None:
    """The ledger in these bytes; None if there is no complete line yet.

    Raises:
        LedgerError: a line is not a ledger's, or does not follow from the one before.
    """
    whole, end, torn = raw.rpartition(b"\n")
    if not end:
        return None
    lines = whole.split(b"\n")
    first = _object(lines[0], name, 0)
    if first.get("kind") != "ledger" or first.get("version") != VERSION:
        raise LedgerError(
            f"{name} is not a ledger of this version: its first line has kind {quoted(first.get('kind'))}, version "
            f"{quoted(first.get('version'))}. Name the population's own ledger."
        )
    population, id, mark = (_of(first, key, kind, name, 0) for key, kind in _HEADER)
    tips, charged = [(0, digest_of(lines[0]))], list[Charged]()
    earlier, budgets, moves = list[Earlier](), list[BudgetSet](), list[str]()
    for number, line in enumerate(lines[1:], start=1):
        found = _object(line, name, number)
        if found.pop("number", None) != number or found.pop("before", None) != tips[-1][1]:
            raise LedgerError(
                f"{name} was changed: line {number} does not follow from line {number - 1} (each line repeats the "
                f"digest of the one before). Restore the original ledger: this one does not show what was spent."
            )
        kind, digest = found.pop("kind", None), digest_of(line)
        try:
            if kind == "event":
                charged.append(Charged(number, digest, Event.from_plain(found)))
            elif kind == "earlier":
                earlier.append(Earlier(**found))
            elif kind == "budget":
                check_reason(reason := found.pop("reason", ""))
                budgets.append(BudgetSet(number, Budget(**found), reason))
            elif kind == "moved":
                mark = _of(found, "mark", str, name, number)
                moves.append(str(found.get("reason", "")))
            else:
                raise LedgerError(f"it has an unknown kind {quoted(kind)}.")
        except (HyperparameterError, LedgerError, TypeError, OverflowError) as error:
            raise LedgerError(f"{name}, line {number}: {error}") from error
        tips.append((number, digest))
    told = tuple(charged), tuple(earlier), tuple(budgets), tuple(moves), tuple(tips)
    return Book(population, id, mark, *told, len(whole) + 1, len(torn))


_HEADER: tuple[tuple[str, Any], ...] = (("population", str), ("id", str), ("mark", str))


def _object(line: bytes, name: str, number: int) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LedgerError(f"{name} is damaged: line {number} is not JSON ({type(error).__name__}).") from error
    if not isinstance(found, dict):
        raise LedgerError(f"{name} is damaged: line {number} is not a table.")
    return found


def _of(found: dict[str, Any], key: str, kind: Any, name: str, number: int) -> Any:
    value = found.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise LedgerError(f"{name} is damaged: line {number} has no {key} ({quoted(value)}).")
    return value
