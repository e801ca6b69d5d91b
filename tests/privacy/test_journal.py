"""The journal: what leaves, leaves once and charged. Kinds of evidence: contract (a kill before every single step, and
in the middle of writes), hostile files.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import secrets
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlora.errors import BudgetSpent, LedgerError
from fedlora.privacy import Budget, Event, Journal, Ledger, Mechanism
from support.kills import STEPS, at_each_step

PLD = pytest.mark.skipif(importlib.util.find_spec("dp_accounting") is None, reason="dp-accounting is not installed")
SIZE = 6
MECHANISM = Mechanism.of(1.0, 1.0, SIZE)
TOTAL = torch.tensor([0, 1, -1, 2**62, -(2**63), 2**63 - 1])


def an_event(round: int = 1, **changed: Any) -> Event:
    facts = {"run": "one", "round": round, "sampling": 1.0, "rounds": 20, "delta": 1e-3, **changed}
    return Event.of(MECHANISM, SIZE, **facts)


def a_journal(home: Path, budget: Budget | None = None) -> Journal:
    return Journal(home / "run" / "journal", Ledger(home / "ledger.jsonl", "some clients"), budget)


def the_file(home: Path) -> Path:
    (path,) = (home / "run" / "journal").glob("*.noised")
    return path


# ---- kills -----------------------------------------------------------------------------------------------------------


def play(home: Path) -> None:
    """A round, drawn or taken from the journal; what leaves is left behind. The noise here is any secret integers: what
    is drawn twice differs."""
    journal = a_journal(home)
    total = journal.stored(1)
    if total is None:
        drawn = torch.tensor([secrets.randbelow(2**50) for _ in range(SIZE)])
        total = journal.store(drawn, an_event())
    (home / f"left-{secrets.token_hex(4)}").write_text(str(total.tolist()))


def look(home: Path) -> tuple[dict[str, str], list[tuple[int, str]], set[str]]:
    """What is in the journal (its digest -> the sum), in the ledger, and what has left."""
    held = {}
    for path in (home / "run" / "journal").glob("*.noised"):
        raw = path.read_bytes()
        numbers = torch.frombuffer(bytearray(raw.partition(b"\n")[2]), dtype=torch.int64)
        held[hashlib.sha256(raw).hexdigest()] = str(numbers.tolist())
    charged = [(event.round, event.released) for event in a_journal(home).ledger.read().events]
    return held, charged, {path.read_text() for path in home.glob("left-*")}


@pytest.mark.parametrize("torn", [False, True])
def test_a_kill_at_any_step_releases_once_and_charged(tmp_path: Path, torn: bool) -> None:
    """By definition: after the resume there is one noised sum, one event with its digest, and all that ever left was
    that sum. What was in the journal at the kill is what leaves at the end; whatever had left was charged."""
    found = at_each_step(tmp_path, play, look, calls=[(os, "pwrite")] if torn else STEPS, torn=torn)
    assert len(found) > (1 if torn else 15)
    seen = Counter()
    for then, (held, charged, left) in found:
        ((digest, total),) = held.items()
        assert charged == [(1, digest)] and left == {total}
        assert not then[0] or then[0] == held
        assert not then[2] or then[1] == charged
        seen[tuple(map(bool, then))] += 1
    assert not list(tmp_path.rglob(".round-*")), "another draw"
    if not torn:  # stages: drawn; written; charged
        assert {(False, False, False), (True, False, False), (True, True, False)} <= set(seen), seen


# ---- in one process --------------------------------------------------------------------------------------------------


def test_what_left_is_given_again_bit_for_bit_and_charged_once(tmp_path: Path) -> None:
    """The extremes of int64 included, little-endian in the file; another journal on the same folder gives the same."""
    journal = a_journal(tmp_path)
    assert journal.stored(1) is None and journal.ledger.read().events == ()
    left = journal.store(TOTAL, an_event(), context="state")
    assert torch.equal(left, TOTAL)
    body = the_file(tmp_path).read_bytes().partition(b"\n")[2]
    assert body == b"".join(x.to_bytes(8, "little", signed=True) for x in TOTAL.tolist())
    for _ in range(3):
        again = a_journal(tmp_path).stored(1, context="state")
        assert again is not None and torch.equal(again, TOTAL)
    (event,) = journal.ledger.read().events
    assert hashlib.sha256(the_file(tmp_path).read_bytes()).hexdigest() == event.released
    assert the_file(tmp_path).name == f"round-00001-{event.released[:16]}.noised"


def test_a_round_has_one_sum(tmp_path: Path) -> None:
    journal = a_journal(tmp_path)
    journal.store(TOTAL, an_event())
    with pytest.raises(LedgerError, match="a round is released once"):
        journal.store(TOTAL + 0, an_event())
    assert len(journal.ledger.read().events) == 1


def test_a_sum_of_another_state_is_not_used(tmp_path: Path) -> None:
    """A rewound run whose configuration changed would lift it into other bases."""
    journal = a_journal(tmp_path)
    journal.store(TOTAL, an_event(), context="one state")
    with pytest.raises(LedgerError, match="another state or configuration"):
        journal.stored(1, context="another")


@pytest.mark.parametrize("at", [0, 30, -1])
def test_a_damaged_file_is_refused_and_not_drawn_anew(tmp_path: Path, at: int) -> None:
    journal = a_journal(tmp_path)
    journal.store(TOTAL, an_event())
    raw = bytearray(the_file(tmp_path).read_bytes())
    raw[at] ^= 1
    the_file(tmp_path).write_bytes(raw)
    for ask in (lambda: journal.stored(1), lambda: journal.store(TOTAL, an_event())):
        with pytest.raises(LedgerError, match=r"damaged|released once"):
            ask()


def test_a_disk_that_refuses_releases_nothing(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("no folder")
    with pytest.raises(LedgerError, match="nothing was released"):
        a_journal(tmp_path).store(TOTAL, an_event())
    assert a_journal(tmp_path).ledger.read().events == ()


@PLD
def test_a_spent_budget_stops_before_anything_is_written(tmp_path: Path) -> None:
    """20 rounds of z = 1 at delta 1e-3 are epsilon 23.06; one is about 3.3, two 5.1."""
    journal = a_journal(tmp_path, Budget(4.0, 1e-3))
    journal.store(TOTAL, an_event(1))
    with pytest.raises(BudgetSpent, match="is 4, and"):
        journal.store(TOTAL, an_event(2))
    assert len(list(journal.folder.iterdir())) == 1 and len(journal.ledger.read().events) == 1
    assert journal.stored(1) is not None  # what was charged may leave again


@PLD
def test_a_sum_whose_budget_was_spent_meanwhile_does_not_leave(tmp_path: Path) -> None:
    """Written, killed before its charge, and another run spent the rest."""
    home = tmp_path / "x"
    a_journal(home).store(TOTAL, an_event())
    (home / "ledger.jsonl").unlink()
    other = Journal(home / "other", Ledger(home / "ledger.jsonl", "some clients"))
    other.store(TOTAL.flip(0), an_event(run="other"))
    with pytest.raises(BudgetSpent):
        a_journal(home, Budget(4.0, 1e-3)).stored(1)
