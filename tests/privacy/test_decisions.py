"""What people write into a ledger: a budget, an earlier training, another place. And `fedlora privacy` that writes it.

Kinds of evidence: oracle (dp-accounting by `epsilon`, which has oracles of its own), contract (what is written stays
and counts), hostile input (wrong words, wrong numbers, files that are none, lines that cannot have been).
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedlora.errors import BudgetSpent, FedLoRAError, HyperparameterError, LedgerError
from fedlora.privacy import Budget, Earlier, Event, Ledger, Mechanism, epsilon, recompute

PLD = pytest.mark.skipif(importlib.util.find_spec("dp_accounting") is None, reason="dp-accounting is not installed")
SIZE = 100


def an_event(round: int, run: str = "one") -> Event:
    digest = f"{round:032x}{sum(map(ord, run)):032x}"
    return Event.of(
        Mechanism.of(1.0, 1.0, SIZE), SIZE, run=run, round=round, sampling=1.0, rounds=20, delta=1e-3, released=digest
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def of(path: Path) -> Ledger:
    return Ledger(path, "some clients")


def kinds(path: Path) -> list[str]:
    return [json.loads(line)["kind"] for line in path.read_text().splitlines()]


# ---- the budget is the population's ----------------------------------------------------------------------------------


@PLD
def test_the_first_budget_that_is_named_stays_and_holds_for_everybody(path: Path) -> None:
    """At delta 1e-3, 3 rounds of z = 1 are within 7.5 and 4 are not (asked of `epsilon`)."""
    assert epsilon(1.0, 3, 1e-3) < 7.5 < epsilon(1.0, 4, 1e-3)
    of(path).charge(an_event(1))
    assert of(path).budget() is None
    of(path).charge(an_event(2), Budget(7.5, 1e-3))
    assert of(path).budget() == Budget(7.5, 1e-3) and kinds(path) == ["ledger", "event", "budget", "event"]
    with pytest.raises(BudgetSpent, match=r"budget is 2, .*privacy\.budget"):
        of(path).charge(an_event(3), Budget(2.0, 1e-3))
    of(path).charge(an_event(3), Budget(50.0, 1e-3))  # which changes nothing of the ledger's
    before = path.read_bytes()
    for own in (Budget(50.0, 1e-3), Budget(50.0, 1e-5), None):
        with pytest.raises(BudgetSpent, match=r"budget is 7\.5, .*3 releases.*Line 2 .*--budget EPSILON"):
            of(path).charge(an_event(4), own)
    assert path.read_bytes() == before
    of(path).charge(an_event(4), left=True)  # what may have left is charged all the same
    assert len(of(path).events()) == 4


@PLD
def test_a_raised_budget_is_a_line_with_its_reason_and_gives_room(path: Path) -> None:
    of(path).charge(an_event(1), Budget(4.0, 1e-3))
    with pytest.raises(BudgetSpent):
        of(path).charge(an_event(2))
    assert of(path).set_budget(Budget(6.0, 1e-3), "the ethics board, 3 May") == 3
    assert of(path).charge(an_event(2)).number == 4
    found = recompute(path)
    assert [(b.number, b.budget.epsilon) for b in found.budgets] == [(1, 4.0), (3, 6.0)]
    assert "run one" in found.budgets[0].reason and found.budgets[1].reason == "the ethics board, 3 May"
    told = of(path).describe(1e-3)["budgets"]
    assert [b["epsilon"] for b in told] == [4.0, 6.0] and told[1]["reason"] == "the ethics board, 3 May"
    of(path).set_budget(Budget(1.0, 1e-3), "never again")  # less: nothing more may be spent
    with pytest.raises(BudgetSpent, match="the budget is 1,"):
        of(path).charge(an_event(3), Budget(50.0, 1e-3))
    with pytest.raises(LedgerError, match="already"):
        of(path).set_budget(Budget(1.0, 1e-3), "again")


# ---- what was spent elsewhere ----------------------------------------------------------------------------------------


@PLD
def test_an_earlier_training_counts_as_its_releases(path: Path) -> None:
    """Oracle: `epsilon` of 5 + 2 releases of z = 1; what was planned too."""
    assert of(path).charge_earlier(Earlier("adapters of 2025", 1.0, 5)) == 1
    for round in (1, 2):
        of(path).charge(an_event(round))
    assert of(path).spent(1e-3) == recompute(path).epsilon == epsilon(1.0, 7, 1e-3)
    assert of(path).planned(1e-3) == epsilon(1.0, 25, 1e-3)
    with pytest.raises(BudgetSpent, match="1 earlier trainings"):
        of(path).check(an_event(3), Budget(epsilon(1.0, 7, 1e-3) + 1e-6, 1e-3))
    (told,) = of(path).describe(1e-3)["earlier"]
    assert told == {"reason": "adapters of 2025", "noise_multiplier": 1.0, "rounds": 5, "sampling": 1.0}


def test_it_is_charged_once_whatever_the_budget(path: Path) -> None:
    of(path).set_budget(Budget(0.1, 1e-3), "hardly anything")
    of(path).charge_earlier(Earlier("a search", 0.5, 100))  # it has happened
    with pytest.raises(LedgerError, match="already"):
        of(path).charge_earlier(Earlier("a search", 0.5, 100))
    of(path).charge_earlier(Earlier("a second search", 0.5, 100))
    assert kinds(path) == ["ledger", "budget", "earlier", "earlier"]


@pytest.mark.parametrize(
    ("numbers", "said"),
    [((0.0, 5), "no finite epsilon"), ((1e-9, 5), "no finite epsilon"), ((-1.0, 5), "noise multiplier"),
     ((float("nan"), 5), "noise multiplier"), ((1.0, 0), "rounds"), ((1.0, -1), "rounds"), ((1.0, 10**9), "rounds"),
     ((1.0, 2, 0.0), "sampling"), ((1.0, 2, 2.0), "sampling"), ((1.0, True), "rounds")],
)  # fmt: skip
def test_impossible_trainings(numbers: Any, said: str) -> None:
    with pytest.raises(HyperparameterError, match=said):
        Earlier("a try", *numbers)


@pytest.mark.parametrize("reason", ["", "  ", "two\nlines", "x" * 501, "\x1b[31mred", None, 5])
def test_a_reason_is_a_line_that_prints(path: Path, reason: Any) -> None:
    of(path).charge(an_event(1))
    before = path.read_bytes()
    for decide in (
        lambda: of(path).set_budget(Budget(1.0, 1e-3), reason),
        lambda: of(path).charge_earlier(Earlier(reason, 1.0, 5)),
        lambda: of(path).adopt(reason),
    ):
        with pytest.raises(LedgerError, match="in a few words"):
            decide()
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "line",
    [{"kind": "budget", "epsilon": -1.0, "delta": 1e-3, "reason": "x"}, {"kind": "budget", "epsilon": 1.0},
     {"kind": "budget", "epsilon": 1.0, "delta": 1e-3, "reason": ""},
     {"kind": "budget", "epsilon": 1.0, "delta": 1e-3, "reason": "x", "more": 1},
     {"kind": "budget", "epsilon": "8", "delta": 1e-3, "reason": "x"},
     {"kind": "earlier", "reason": "x", "noise_multiplier": 0.0, "rounds": 1, "sampling": 1.0},
     {"kind": "earlier", "reason": "x", "noise_multiplier": [1], "rounds": 1}, {"kind": "earlier"},
     {"kind": "gift", "epsilon": -5.0}],
)  # fmt: skip
def test_lines_that_cannot_have_been_are_refused(path: Path, line: dict[str, Any]) -> None:
    """In a chain whose digests are right, so that it is the line itself that is refused."""
    from fedlora.privacy import chain

    of(path).charge(an_event(1))
    book = chain.read(path.read_bytes(), "")
    assert book is not None
    with path.open("ab") as file:
        file.write(chain.line_of({"number": 2, "before": book.tip[1], **line}))
    for ask in (lambda: of(path).events(), lambda: recompute(path), lambda: of(path).charge(an_event(2))):
        with pytest.raises(LedgerError, match="line 2"):
            ask()


def test_a_decision_is_not_written_to_a_copy_nor_to_others(path: Path, tmp_path: Path) -> None:
    of(path).charge(an_event(1))
    shutil.copyfile(path, copied := tmp_path / "copy.jsonl")
    before = copied.read_bytes()
    for decide in (
        lambda: of(copied).set_budget(Budget(1.0, 1e-3), "why"),
        lambda: of(copied).charge_earlier(Earlier("why", 1.0, 1)),
        lambda: Ledger(path, "others").set_budget(Budget(1.0, 1e-3), "why"),
    ):
        with pytest.raises(LedgerError, match=r"is a copy|belongs to the population"):
            decide()
    assert copied.read_bytes() == before
    with pytest.raises(LedgerError, match="is the ledger itself"):
        of(path).adopt("why not")
    path.with_name("ledger.jsonl.tip").unlink()
    with pytest.raises(LedgerError, match=r"tip is missing.*--adopt"):
        of(path).charge(an_event(2))
    of(path).adopt("the disk lost it")  # whoever says so stands in it
    assert of(path).charge(an_event(2)).number == 3 and recompute(path).moves == ("the disk lost it",)


# ---- the command -----------------------------------------------------------------------------------------------------


def said(*args: Any, code: int = 0) -> str:
    from fedlora.cli import app

    found = CliRunner().invoke(app, ["privacy", *map(str, args)])
    if found.exit_code != 0:  # what `main` turns into one line and exit code 2
        assert isinstance(found.exception, FedLoRAError), found.output
        assert code == 2, found.exception
        return str(found.exception)
    assert code == 0, found.output
    return " ".join(found.output.split())


@PLD
def test_the_command_begins_charges_raises_and_adopts(path: Path) -> None:
    charge = ["--charge", "--noise-multiplier", 1.0, "--rounds", 5, "--because", "adapters of 2025"]
    assert "--population" in said(path, *charge, code=2) and not path.exists()
    shown = said(path, *charge, "--population", "some clients")
    assert f"epsilon {epsilon(1.0, 5, 1e-5):.1f}"[:10] in shown and "earlier training charged, 5 rounds" in shown
    assert "already" in said(path, *charge, code=2)
    assert "--delta is missing" in said(path, "--budget", 9, "--because", "x", code=2)
    assert "budget: epsilon 9 at delta 0.001" in said(path, "--budget", 9, "--delta", 1e-3, "--because", "x")
    assert "raised in line 3" in said(path, "--budget", 12, "--because", "the board | agreed")
    told = json.loads(said(path, "--json"))
    assert [b["epsilon"] for b in told["budgets"]] == [9.0, 12.0] and told["earlier"][0]["rounds"] == 5
    moved = path.with_name("moved.jsonl")
    shutil.copyfile(path, moved)
    shutil.copyfile(path.with_name("ledger.jsonl.tip"), moved.with_name("moved.jsonl.tip"))
    assert "ledger moved: a new server" in said(moved, "--adopt", "--because", "a new server")
    assert of(moved).charge(an_event(1)).number == 5


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--adopt"], "--because"),
        (["--budget", 5, "--charge", "--because", "x"], "one at a time"),
        (["--rounds", 5], "--rounds goes with --charge"),
        (["--charge", "--because", "x"], "needs --noise-multiplier and --rounds"),
        (["--charge", "--noise-multiplier", 0, "--rounds", 5, "--because", "x"], "no finite epsilon"),
        (["--budget", -1, "--delta", 1e-3, "--because", "x"], "positive and finite"),
        (["--budget", 1, "--delta", 2, "--because", "x"], "delta is a probability"),
        (["--because", "x"], "--because goes with --budget"),
        (["--population", "x"], "--population goes with --budget"),
        (["--adopt", "--delta", 1e-3, "--because", "x"], "--delta goes with --budget"),
        (["--budget", 1, "--delta", 1e-3, "--because", "x", "--population", "others"], "leave --population out"),
        (["--plan", "--because", "x"], "--because goes with --budget"),
    ],
)
def test_the_command_says_what_is_wrong_and_writes_nothing(path: Path, args: list[Any], words: str) -> None:
    of(path).charge(an_event(1))
    before = path.read_bytes()
    assert words in said(path, *args, code=2)
    assert path.read_bytes() == before


def test_where_data_are_by_the_environment_says_nothing_of_a_ledger(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option counts as typed where it was typed: the variable is for the runs of the same shell."""
    of(path).charge(an_event(1))
    monkeypatch.setenv("FEDLORA_DATA_ROOT", str(path.parent))
    assert "in 1 releases" in said(path)
    assert "--data-root" in said(path, "--data-root", path.parent, code=2)


def test_a_file_that_is_no_ledger_stays_as_it_is(path: Path) -> None:
    path.write_text("my notes\n")
    assert said(path, "--budget", 5, "--delta", 1e-3, "--because", "x", code=2)
    assert path.read_text() == "my notes\n"
    path.write_text("")
    shown = said(path, "--budget", 5, "--delta", 1e-3, "--because", "x", code=2)
    assert "leave --population out" in shown or "--population" in shown


@pytest.mark.parametrize(
    ("z", "rounds", "q"),
    [
        (1e200, 1, 1.0),
        (1e308, 1, 1.0),
        (1.0, 1, 5e-324),
        (1.0, 1, 1e-300),
        (1e-3, 1_000_000, 1.0),
        (1e-3, 1_000_000, 1e-6),
    ],
)
def test_an_absurd_training_is_refused_before_it_is_written_and_the_ledger_stays_usable(
    tmp_path: Path, z: float, rounds: int, q: float
) -> None:
    """A line stays for good: one whose epsilon no accountant finds would end the population's ledger."""
    ledger = Ledger(tmp_path / "l.jsonl", "six")
    ledger.set_budget(Budget(10.0, 1e-3), "agreed")
    before = ledger.path.read_bytes()
    with pytest.raises((HyperparameterError, LedgerError)):
        ledger.charge_earlier(Earlier("absurd", z, rounds, q))
    assert ledger.path.read_bytes() == before
    ledger.charge_earlier(Earlier("sane", 10.0, 3))
    assert 0 < ledger.spent(1e-3) < 10


def test_a_ledger_that_was_cut_off_in_place_is_not_called_whole(tmp_path: Path) -> None:
    """Whoever reads it gets what charging says: the tip beside it knows a later line. Without a tip nobody can know."""
    ledger = Ledger(tmp_path / "l.jsonl", "six")
    for year in ("2024", "2025"):
        ledger.charge_earlier(Earlier(f"the adapter of {year}", 10.0, 3))
    whole = recompute(ledger.path)
    assert whole.has_tip
    first = b"".join(ledger.path.read_bytes().splitlines(keepends=True)[:2])
    ledger.path.write_bytes(first)
    with pytest.raises(LedgerError, match="cut off"):
        recompute(ledger.path)
    (tmp_path / "l.jsonl.tip").unlink()
    assert not recompute(ledger.path).has_tip
    assert recompute(ledger.path).epsilon < whole.epsilon
