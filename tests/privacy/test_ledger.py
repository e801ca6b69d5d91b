"""The ledger of a population. Kinds of evidence: oracle (dp-accounting by `epsilon`, which has oracles of its own),
contract (processes at once, a full or failing disk), hostile files (torn, edited, exchanged). And `fedlora privacy`.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedlora.errors import BudgetSpent, FedLoRAError, HyperparameterError, LedgerError
from fedlora.privacy import Budget, Event, Ledger, Mechanism, Spending, epsilon, recompute
from support.processes import Program

PLD = pytest.mark.skipif(importlib.util.find_spec("dp_accounting") is None, reason="dp-accounting is not installed")
SIZE = 100


def an_event(round: int = 1, *, z: float = 1.0, q: float = 1.0, run: str = "one", digest: str = "") -> Event:
    return Event.of(
        Mechanism.of(1.0, z, SIZE), SIZE, run=run, round=round, sampling=q, rounds=20, delta=1e-3,
        released=digest or f"{round:032x}{sum(map(ord, run)):032x}",
    )  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def of(path: Path) -> Ledger:
    return Ledger(path, "some clients")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- lines, and what they say ----------------------------------------------------------------------------------------


def test_each_charge_is_a_line_that_follows_from_the_one_before(path: Path) -> None:
    """SHA-256 of each line's bytes stands in the next one. No line has a time: of one run's times another one's would
    follow."""
    assert of(path).read().events == () and not path.exists()  # asking makes nothing
    for round in (1, 2, 3):
        of(path).charge(an_event(round))
    of(path).charge_earlier(Spending(5.0, 2))
    of(path).set_budget(Budget(50.0, 1e-3))
    header, *others = lines(path)
    assert set(header) == {"kind", "version", "population", "meaning"} and "dp-accounting" in header["meaning"]
    assert [line["kind"] for line in others] == ["event"] * 3 + ["earlier", "budget"]
    assert [line["number"] for line in others] == [1, 2, 3, 4, 5]
    digests = [hashlib.sha256(line).hexdigest() for line in path.read_bytes().splitlines()]
    assert [line["before"] for line in others] == digests[:-1]
    assert recompute(path).newest == (5, digests[-1])
    assert of(path).read().events == tuple(an_event(round) for round in (1, 2, 3))
    assert set(others[0]) == {*asdict(an_event()), "kind", "number", "before"}


def test_the_same_release_is_charged_once(path: Path) -> None:
    """And another one of the same round is another charge: it was released."""
    for _ in range(2):
        of(path).charge(an_event(1))
        assert len(of(path).read().events) == 1
    for event in (an_event(1, digest="f" * 64), an_event(1, run="two")):
        of(path).charge(event)
    assert len(of(path).read().events) == 3


@PLD
def test_what_is_spent_and_planned(path: Path) -> None:
    """Oracle: `epsilon`. Two releases of round 1 of 20 planned ones are 21; five earlier ones count as such."""
    assert of(path).read(1e-3).planned == of(path).read(1e-3).epsilon == 0.0
    for digest in ("e" * 64, "f" * 64):
        of(path).charge(an_event(1, digest=digest))
    assert of(path).read(1e-3).epsilon == epsilon(1.0, 2, 1e-3)
    assert of(path).read(1e-3).planned == epsilon(1.0, 21, 1e-3)
    of(path).charge_earlier(Spending(1.0, 5))
    told, found = of(path).describe(1e-3), recompute(path)
    assert told["epsilon"] == found.epsilon == epsilon(1.0, 7, 1e-3) and found.delta == 1e-3
    assert told["planned_epsilon"] == found.planned == epsilon(1.0, 26, 1e-3)
    assert told["earlier"] == [{"noise_multiplier": 1.0, "rounds": 5, "sampling": 1.0}] and told["events"] == 2


# ---- the budget ------------------------------------------------------------------------------------------------------


@PLD
def test_an_event_that_would_pass_the_budget_is_refused_and_not_written(path: Path) -> None:
    """Reference: 20 rounds of z = 1 at delta 1e-3 are 23.06: within 23.1, and the 21st is not. Other runs count."""
    budget = Budget(23.1, 1e-3)
    of(path).check(an_event(1), budget, rounds=20)
    with pytest.raises(BudgetSpent, match=r"21 more releases.*is 23.1, and 0\.000 of it"):
        of(path).check(an_event(1), budget, rounds=21)
    for round in range(1, 21):
        of(path).charge(an_event(round, run="first" if round < 11 else "second"))
    before = path.read_bytes()
    with pytest.raises(BudgetSpent, match=r"23\.06\d of it is spent"):
        of(path).charge(an_event(21, run="third"), budget)
    assert path.read_bytes() == before
    of(path).charge(an_event(20, run="second"), budget)  # charged already: free
    assert path.read_bytes() == before


@PLD
def test_the_first_budget_that_is_named_holds_for_everybody_until_another_is_set(path: Path) -> None:
    """At delta 1e-3, 3 rounds of z = 1 are within 7.5 and 4 are not (asked of `epsilon`)."""
    assert epsilon(1.0, 3, 1e-3) < 7.5 < epsilon(1.0, 4, 1e-3)
    of(path).charge(an_event(1))
    assert of(path).read().budgets == ()
    of(path).charge(an_event(2), Budget(7.5, 1e-3))
    assert of(path).read().budgets == (Budget(7.5, 1e-3),)
    with pytest.raises(BudgetSpent, match=r"own privacy\.budget is 2, "):
        of(path).charge(an_event(3), Budget(2.0, 1e-3))
    of(path).charge(an_event(3), Budget(50.0, 1e-3))  # which changes nothing of the ledger's
    before = path.read_bytes()
    for own in (Budget(50.0, 1e-3), Budget(50.0, 1e-5), None):
        with pytest.raises(BudgetSpent, match=r"budget of ledger\.jsonl is 7\.5, .*--budget EPSILON"):
            of(path).charge(an_event(4), own)
    assert path.read_bytes() == before
    of(path).set_budget(Budget(9.5, 1e-3))
    of(path).charge(an_event(4))
    assert recompute(path).newest[0] == 6
    assert [b["epsilon"] for b in of(path).describe(1e-3)["budgets"]] == [7.5, 9.5]
    of(path).set_budget(Budget(1.0, 1e-3))  # less: nothing more may be spent
    with pytest.raises(BudgetSpent, match="is 1,"):
        of(path).charge(an_event(5), Budget(50.0, 1e-3))


@PLD
@pytest.mark.parametrize(("z", "rounds", "q"), [(1.0, 0, 1.0), (1e-3, 10**6, 1.0), (1e-3, 10**6, 1e-6)])
def test_an_earlier_training_without_a_finite_epsilon_is_not_written(
    path: Path, z: float, rounds: int, q: float
) -> None:
    """A line stays for good, so this one would end the ledger. A sane one counts, whatever the budget: it happened."""
    of(path).set_budget(Budget(0.01, 1e-3))
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="no finite epsilon"):
        of(path).charge_earlier(Spending(z, rounds, q))
    assert path.read_bytes() == before
    of(path).charge_earlier(Spending(10.0, 3))
    assert of(path).read(1e-3).epsilon == epsilon(10.0, 3, 1e-3)


# ---- files that are not as they were ---------------------------------------------------------------------------------


def test_a_torn_line_was_never_a_charge(path: Path) -> None:
    """A writer killed in the middle of its line had released nothing. Every kind of cut of the last line."""
    for round in (1, 2):
        of(path).charge(an_event(round))
    whole = path.read_bytes()
    of(path).charge(an_event(3))
    added = path.read_bytes()[len(whole) :]
    for cut in (1, 2, len(added) // 2, len(added) - 1):
        path.write_bytes(whole + added[:cut])
        assert len(of(path).read().events) == 2 == len(recompute(path).events)
        of(path).charge(an_event(4))
        assert recompute(path).newest[0] == 3
        assert [event.round for event in of(path).read().events] == [1, 2, 4]


def test_a_torn_header_is_begun_anew_and_no_other_file_is_touched(path: Path) -> None:
    path.write_bytes(b'{"kind": "led')
    of(path).charge(an_event(1))
    assert recompute(path).newest[0] == 1 and len(lines(path)) == 2
    for notes in ("my notes", "my notes\n"):
        path.write_text(notes)
        for ask in (lambda: of(path).charge(an_event(1)), lambda: of(path).check(an_event(1), None)):
            with pytest.raises(LedgerError, match="holds no ledger"):
                ask()
        assert path.read_text() == notes
    with pytest.raises(LedgerError, match="cannot be"):
        of(path.parent).charge(an_event(1))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda found: [*found[:2], *found[3:]], "does not follow"),
        (lambda found: [found[0], found[2], found[1], *found[3:]], "does not follow"),
        (lambda found: [found[0], found[1].replace(b'"round": 1', b'"round": 5'), *found[2:]], "does not follow"),
        (lambda found: [*found, b"\n"], "no table"),
        (lambda found: [*found, b'{"number": 4, "before": null}\n'], "does not follow"),
        (lambda found: [b"{}\n", *found], "holds no ledger"),
        (lambda found: [found[0].replace(b': 2}', b': 1}'), *found[1:]], "version 1"),
    ],
)  # fmt: skip
def test_a_broken_chain_is_refused(path: Path, change: Callable[[list[bytes]], list[bytes]], said: str) -> None:
    """Nothing is charged to it, and nothing is told from it."""
    for round in (1, 2, 3):
        of(path).charge(an_event(round))
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    before = path.read_bytes()
    for ask in (lambda: of(path).charge(an_event(9)), lambda: of(path).read().events, lambda: recompute(path)):
        with pytest.raises(LedgerError, match=said):
            ask()
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "line",
    [{"kind": "budget", "epsilon": -1.0, "delta": 1e-3}, {"kind": "earlier", "noise_multiplier": [1], "rounds": 1},
     {"kind": "gift", "epsilon": -5.0}, {**asdict(an_event(2)), "kind": "event", "more": 1},
     {**asdict(an_event(2)), "kind": "event", "size": 10**400}],
)  # fmt: skip
def test_lines_that_cannot_have_been_are_refused(path: Path, line: dict[str, Any]) -> None:
    """In a chain whose digests are right, so that it is the line itself that is refused."""
    of(path).charge(an_event(1))
    with path.open("a") as file:
        file.write(json.dumps({"number": 2, "before": recompute(path).newest[1], **line}) + "\n")
    for ask in (lambda: of(path).read().events, lambda: recompute(path), lambda: of(path).charge(an_event(2))):
        with pytest.raises(LedgerError, match="line 2"):
            ask()


def test_another_population_has_another_ledger(path: Path) -> None:
    of(path).charge(an_event(1))
    with pytest.raises(LedgerError, match=r"'some clients', not 'others'"):
        Ledger(path, "others").charge(an_event(2))
    for name in ("", "a\nb", "x" * 300, 5):
        with pytest.raises(LedgerError, match="population"):
            Ledger(path, name)  # type: ignore[arg-type]
    with pytest.raises(LedgerError, match="does not exist"):
        recompute(path.with_name("none.jsonl"))


# ---- processes at once, and disks ------------------------------------------------------------------------------------


CHARGES = """
import secrets, sys
from pathlib import Path
from fedlora.errors import BudgetSpent
from fedlora.privacy import Budget, Event, Ledger, Mechanism

path, run, count, *most = sys.argv[1:]
budget, charged = Budget(float(most[0]), 1e-3) if most else None, 0
try:
    for number in range(1, int(count) + 1):
        event = Event.of(Mechanism.of(1.0, 1.0, 40), 40, run=run, round=number, sampling=1.0, rounds=20, delta=1e-3,
                         released=secrets.token_hex(32))
        Ledger(Path(path), "some clients").charge(event, budget)
        charged += 1
except BudgetSpent:
    pass
print(charged)
"""


def charged_at_once(path: Path, program: Callable[..., Program], *words: object) -> list[int]:
    """How many charges two processes at work on one ledger could make."""
    (script := path.with_name("charges.py")).write_text(CHARGES)
    both = [program(script, path, run, *words) for run in ("one", "two")]
    return [int(each.ended().stdout) for each in both]


def test_two_processes_charge_at_once(path: Path, program: Callable[..., Program]) -> None:
    """By definition: every charge of both is there once, in one chain."""
    assert charged_at_once(path, program, 6) == [6, 6]
    events = of(path).read().events
    assert recompute(path).newest[0] == len(events) == 12
    assert sorted((c.run, c.round) for c in events) == [(r, k) for r in ("one", "two") for k in range(1, 7)]


@PLD
def test_two_processes_cannot_spend_one_budget_twice(path: Path, program: Callable[..., Program]) -> None:
    """At delta 1e-3, 2 rounds of z = 1 are within 5.5, and 3 are not (asked of `epsilon`, which has oracles)."""
    assert epsilon(1.0, 2, 1e-3) < 5.5 < epsilon(1.0, 3, 1e-3)
    assert sum(charged_at_once(path, program, 9, 5.5)) == 2 == len(of(path).read().events)


def test_a_full_disk_charges_nothing_and_leaves_the_ledger_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of(path).charge(an_event(1))
    before, whole = path.read_bytes(), os.pwrite

    def full(descriptor: int, raw: bytes, at: int) -> int:
        if len(raw) < 30:
            raise OSError(28, "No space left on device")
        return whole(descriptor, raw[: len(raw) // 2], at)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(LedgerError, match="No space left"):
            of(path).charge(an_event(2))
    assert path.read_bytes() == before
    of(path).charge(an_event(2))
    assert recompute(path).newest[0] == 2


def test_a_disk_that_does_not_keep_what_was_flushed_is_heard(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system without locks (flock fails) is heard as well."""
    of(path).charge(an_event(1))

    def broken(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    for owner, name in ((os, "fsync"), (fcntl, "flock")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, broken)
            for event in (an_event(2), an_event(1)):  # a new one, and one whose writer may not have flushed it
                with pytest.raises(LedgerError, match="Input/output error"):
                    of(path).charge(event)
    assert len(of(path).read().events) == 1


# ---- events ----------------------------------------------------------------------------------------------------------


def test_an_event_without_its_release_and_impossible_budgets(path: Path) -> None:
    with pytest.raises(LedgerError, match="digest"):
        of(path).charge(Event(**{**asdict(an_event(1)), "released": ""}))
    for most, delta in ((0, 1e-5), (float("nan"), 1e-5), (1, 0)):
        with pytest.raises(HyperparameterError):
            Budget(most, delta)


# ---- the command -----------------------------------------------------------------------------------------------------


def said(*args: Any, code: int = 0) -> str:
    from fedlora.cli import app

    found = CliRunner().invoke(app, ["privacy", *map(str, args)])
    if found.exit_code != 0:  # what `main` turns into one line and exit code 2
        assert isinstance(found.exception, FedLoRAError) and code == 2, found.output
        return str(found.exception)
    assert code == 0, found.output
    return " ".join(found.output.split())


@PLD
def test_the_command_begins_charges_and_raises(path: Path) -> None:
    charge = ["--charge", 1.0, 5, 1]
    assert "--population" in said(path, *charge, code=2) and not path.exists()
    path.touch()
    assert "--population" in said(path, *charge, code=2) and not path.read_bytes()
    shown = said(path, *charge, "--population", "some clients")
    assert f"epsilon {epsilon(1.0, 5, 1e-5):.1f}"[:10] in shown and "earlier" in shown
    assert "--delta is missing" in said(path, "--budget", 9, code=2)
    assert "budget: epsilon 9 at delta 0.001." in said(path, "--budget", 9, "--delta", 1e-3)
    assert "epsilon 9 at delta 0.001, then epsilon 12 at delta 0.001." in said(path, "--budget", 12)
    told = json.loads(said(path, "--json"))
    assert [b["epsilon"] for b in told["budgets"]] == [9.0, 12.0] and told["earlier"][0]["rounds"] == 5


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--budget", 5, "--charge", 1, 5, 1], "one at a time"),
        (["--charge", 0, 5, 1], "no finite epsilon"),
        (["--budget", -1, "--delta", 1e-3], "positive and finite"),
        (["--budget", 1, "--delta", 1e-3, "--population", "others"], "belongs to the population"),
    ],
)
def test_the_command_says_what_is_wrong_and_writes_nothing(path: Path, args: list[Any], words: str) -> None:
    of(path).charge(an_event(1))
    before = path.read_bytes()
    assert words in said(path, *args, code=2)
    assert path.read_bytes() == before
