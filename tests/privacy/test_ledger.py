"""The ledger of a population. Kinds of evidence: oracle (dp-accounting alone, on the file's lines), contract (processes
at once), hostile files (torn, cut off, edited, copied, exchanged).
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import support
from fedlora.errors import BudgetSpent, HyperparameterError, LedgerError
from fedlora.privacy import Budget, Event, Ledger, Mechanism, chain, epsilon, ledger, locked_file, recompute
from fedlora.privacy.decisions import Earlier
from fedlora.privacy.outside import Outside
from fedlora.privacy.released import fate_of, filtered, unlisted
from support.processes import Program

ROUNDS = Path(support.__file__).parent / "privacy_rounds.py"
PLD = pytest.mark.skipif(importlib.util.find_spec("dp_accounting") is None, reason="dp-accounting is not installed")
SIZE = 100


def an_event(
    round: int = 1, *, z: float = 1.0, q: float = 1.0, run: str = "one", digest: str = "", **changed: Any
) -> Event:
    found = Event.of(
        Mechanism.of(1.0, z, SIZE), SIZE, run=run, round=round, sampling=q, **{"rounds": 20, "delta": 1e-3, **changed}
    )
    return Event(**{**found.plain(), "released": digest or f"{round:032x}{abs(hash(run)) % 2**64:032x}"})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def of(path: Path) -> Ledger:
    return Ledger(path, "some clients")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_charge_is_a_line_that_follows_from_the_one_before(path: Path) -> None:
    assert of(path).events() == () and not path.exists()  # asking makes nothing
    for round in (1, 2, 3):
        charged = of(path).charge(an_event(round))
        assert (charged.number, charged.event) == (round, an_event(round))
    header, *events = lines(path)
    assert header["population"] == "some clients" and "dp-accounting" in header["meaning"]
    assert [event["number"] for event in events] == [1, 2, 3]
    assert [charged.event for charged in of(path).events()] == [an_event(round) for round in (1, 2, 3)]
    assert {"sampling", "noise_multiplier", "clip", "size", "grid", "sensitivity", "rounds", "delta", "released", "run",
            "round"} <= set(events[0])  # fmt: skip


def test_an_event_has_all_its_fields_and_no_other() -> None:
    plain = an_event(1).plain()
    assert Event.from_plain(plain) == an_event(1)
    for found in [{name: plain[name] for name in plain if name != left} for left in plain] + [plain | {"more": 1}]:
        with pytest.raises(LedgerError, match="fields"):
            Event.from_plain(found)


def test_the_same_release_is_charged_once_and_any_other_again(path: Path) -> None:
    first = of(path).charge(an_event(1))
    assert of(path).charge(an_event(1)) == first
    of(path).charge(an_event(1, digest="f" * 64))  # a second draw of the round
    of(path).charge(an_event(1, run="two"))  # another run
    assert [charged.number for charged in of(path).events()] == [1, 2, 3]


@PLD
def test_an_outsider_recomputes_epsilon_from_the_lines(path: Path) -> None:
    """Oracle: dp-accounting alone, on the JSON of the file, as its first line says; of the plan too."""
    for k in range(4):
        of(path).charge(an_event(k + 1, rounds=10))
    of(path).charge(an_event(1, z=0.8, q=0.25, run="search, trial 1", rounds=3))
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    def composed(events: list[tuple[float, float, int]]) -> float:
        accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, 1e-3)
        for q, z, count in events:
            accountant.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z)), count)
        return float(accountant.get_epsilon(1e-3))

    counts = Counter((e["sampling"], e["noise_multiplier"]) for e in lines(path) if e["kind"] == "event")
    told = [(q, z, count) for (q, z), count in counts.items()]
    found = recompute(path)
    assert found.delta == 1e-3 and found.population == "some clients" and len(found.events) == 5
    assert found.epsilon == pytest.approx(composed(told), rel=1e-3)
    assert found.planned == pytest.approx(composed([(1.0, 1.0, 10), (0.25, 0.8, 3)]), rel=1e-3)
    assert of(path).spent(1e-3) == found.epsilon and of(path).planned(1e-3) == found.planned
    facts = of(path).describe(1e-3)
    assert (facts["epsilon"], facts["planned_epsilon"], facts["events"]) == (found.epsilon, found.planned, 5)
    assert tuple(facts["tip"]) == found.tip and json.dumps(facts)


@PLD
def test_a_second_draw_of_a_round_is_beyond_the_plan(path: Path) -> None:
    """Two events of round 1 of 20: 21 releases. Before the first event nothing is planned."""
    assert of(path).planned(1e-3) == of(path).spent(1e-3) == 0.0
    of(path).charge(an_event(1))
    of(path).charge(an_event(1, digest="f" * 64))
    other = of(path.with_name("other.jsonl"))
    for round in range(1, 22):
        other.charge(an_event(round))
    assert of(path).planned(1e-3) == other.spent(1e-3)


@PLD
def test_an_event_that_would_pass_the_budget_is_refused_and_not_written(path: Path) -> None:
    """Reference: 20 rounds of z = 1 at delta 1e-3 are 23.06: within 23.1, and the 21st is not. Other runs count."""
    budget = Budget(23.1, 1e-3)
    of(path).check(an_event(1), budget, rounds=20)
    with pytest.raises(BudgetSpent, match=r"21 more releases.*the budget is 23.1.*0 releases"):
        of(path).check(an_event(1), budget, rounds=21)
    for round in range(1, 21):
        of(path).charge(an_event(round, run="first" if round < 11 else "second"))
    before = path.read_bytes()
    with pytest.raises(BudgetSpent, match=r"20 releases have spent 23\.06"):
        of(path).charge(an_event(21, run="third"), budget)
    assert path.read_bytes() == before
    assert of(path).charge(an_event(20, run="second"), budget).number == 20  # charged already: free


def test_a_torn_line_was_never_a_charge(path: Path) -> None:
    """A writer killed in the middle of its line had released nothing. Every cut of the last line."""
    for round in (1, 2):
        of(path).charge(an_event(round))
    outside = Outside("ledgers", lines(path)[0]["id"]).path
    whole, tip, known = path.read_bytes(), path.with_name("ledger.jsonl.tip").read_bytes(), outside.read_bytes()
    of(path).charge(an_event(3))
    added = path.read_bytes()[len(whole) :]
    for cut in (1, 2, len(added) // 2, len(added) - 1):
        with path.open("r+b") as file:  # the same file: its inode is a part of what is known
            file.truncate(len(whole) + cut) or file.seek(0) or file.write(whole + added[:cut])
        path.with_name("ledger.jsonl.tip").write_bytes(tip)
        outside.write_bytes(known)
        assert len(of(path).events()) == 2 and len(recompute_events(path)) == 2
        assert of(path).charge(an_event(4)).number == 3
        assert [charged.event.round for charged in of(path).events()] == [1, 2, 4]


def recompute_events(path: Path) -> tuple[Any, ...]:
    return ledger.chain.read(path.read_bytes(), "a ledger").charged  # type: ignore[union-attr]


def test_a_torn_header_is_begun_anew(path: Path) -> None:
    path.write_bytes(b'{"kind": "led')
    assert of(path).charge(an_event(1)).number == 1
    assert len(lines(path)) == 2


def rewritten(path: Path, change: Callable[[list[bytes]], list[bytes]]) -> None:
    """In place: the same inode."""
    raw = b"".join(change(path.read_bytes().splitlines(keepends=True)))
    with path.open("r+b") as file:
        file.truncate(0)
        file.write(raw)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda found: found[:-1], "cut off"),
        (lambda found: found[:1], "cut off"),
        (lambda found: [], "missing or empty"),
        (lambda found: [*found[:2], *found[3:]], "does not follow"),
        (lambda found: [found[0], found[2], found[1], *found[3:]], "does not follow"),
        (lambda found: [found[0], found[1].replace(b'"noise_multiplier": 1.0', b'"noise_multiplier": 9.0'), *found[2:]],
         "sensitivity|does not follow"),
        (lambda found: [found[0].replace(b"some clients", b"some cliEnts"), *found[1:]], "does not follow"),
        (lambda found: [*found[:-1], found[-1].replace(b'"round": 3', b'"round": 4')], "cut off, changed"),
        (lambda found: [*found, b"\n"], "not JSON"),
        (lambda found: [*found, b"[1]\n"], "not a table"),
        (lambda found: [*found, b"\xff\xfe\n"], "not JSON"),
        (lambda found: [*found, b'{"number": 4, "before": null}\n'], "does not follow"),
        (lambda found: [b"{}\n", *found], "not a ledger of this"),
    ],
)  # fmt: skip
def test_a_changed_ledger_is_refused(path: Path, change: Callable[[list[bytes]], list[bytes]], said: str) -> None:
    """Nothing is charged to it, and nothing is told from it."""
    for round in (1, 2, 3):
        of(path).charge(an_event(round))
    rewritten(path, change)
    before = path.read_bytes()
    for ask in (lambda: of(path).charge(an_event(9)), lambda: of(path).spent(1e-3), lambda: of(path).events()):
        with pytest.raises(LedgerError, match=said):
            ask()
    assert path.read_bytes() == before


def test_a_chain_that_was_made_anew_is_told_by_the_tip(path: Path, tmp_path: Path) -> None:
    """Somebody with the code rewrites the whole ledger, with a larger z, and all digests right."""
    for round in (1, 2):
        of(path).charge(an_event(round))
    kept = recompute(path).tip
    other = tmp_path / "other.jsonl"
    for round in (1, 2, 3):
        of(other).charge(an_event(round, z=50.0))
    rewritten(path, lambda found: [found[0], *other.read_bytes().splitlines(keepends=True)[1:]])
    with pytest.raises(LedgerError, match="does not follow"):  # the header's digest is another
        of(path).events()
    rewritten(path, lambda found: other.read_bytes().splitlines(keepends=True))
    with pytest.raises(LedgerError, match="cut off, changed"):
        of(path).events()
    with pytest.raises(LedgerError):
        of(path).charge(an_event(4))
    assert tuple(kept) not in ledger.chain.read(path.read_bytes(), "").tips  # type: ignore[union-attr]


def test_a_removed_ledger_is_not_begun_anew_beside_its_tip(path: Path) -> None:
    of(path).charge(an_event(1))
    path.unlink()
    for ask in (lambda: of(path).charge(an_event(2)), lambda: of(path).events(), lambda: of(path).charge(an_event(2))):
        with pytest.raises(LedgerError, match="missing or empty"):
            ask()


def test_a_copy_is_refused_until_somebody_says_that_it_is_the_one(path: Path, tmp_path: Path) -> None:
    of(path).charge(an_event(1))
    (tmp_path / "elsewhere").mkdir()
    copied = tmp_path / "elsewhere" / "ledger.jsonl"
    shutil.copyfile(path, copied)
    with pytest.raises(LedgerError, match=r"a copy.*adopt"):
        of(copied).charge(an_event(2))
    assert len(of(copied).events()) == 1  # reading is free
    of(copied).adopt("a new disk")
    assert of(copied).charge(an_event(2)).number == 3
    assert [line.get("reason") for line in lines(copied)] == [None, None, "a new disk", None]
    with pytest.raises(LedgerError, match="stays in the ledger"):
        of(copied).adopt(" ")
    (tmp_path / "empty.jsonl").touch()
    for name in ("none", "empty"):
        with pytest.raises(LedgerError, match="nothing to adopt"):
            of(tmp_path / f"{name}.jsonl").adopt("why not")


def test_adopting_mends_no_ledger_that_was_cut_off(path: Path) -> None:
    for round in (1, 2):
        of(path).charge(an_event(round))
    rewritten(path, lambda found: found[:-1])
    with pytest.raises(LedgerError, match="cut off"):
        of(path).adopt("it is short")


def test_a_missing_tip_is_refused_but_for_a_ledger_that_is_just_begun(path: Path) -> None:
    """Killed between the header and the first tip, nothing was spent; later the tip is there before any event is."""
    of(path).charge(an_event(1))
    tip = path.with_name("ledger.jsonl.tip")
    tip.unlink()
    with pytest.raises(LedgerError, match="tip is missing"):
        of(path).charge(an_event(2))
    (line, header) = (path.read_bytes().splitlines(True)[0], json.loads(path.read_text().splitlines()[0]))
    rewritten(path, lambda found: found[:1])
    with pytest.raises(LedgerError, match="older than what"):  # it was not: line 1 is known
        of(path).charge(an_event(2))
    known = Outside("ledgers", header["id"])  # as it is before the first line
    known.write(path, mark=header["mark"], number=0, digest=chain.digest_of(line))
    assert of(path).charge(an_event(2)).number == 1 and tip.exists()


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"nonsense", b"\xff"])
def test_a_damaged_tip_is_refused(path: Path, content: bytes) -> None:
    of(path).charge(an_event(1))
    path.with_name("ledger.jsonl.tip").write_bytes(content)
    with pytest.raises(LedgerError, match="tip cannot be read"):
        of(path).charge(an_event(2))


def test_another_population_has_another_ledger(path: Path) -> None:
    of(path).charge(an_event(1))
    with pytest.raises(LedgerError, match=r"'some clients', not 'others'"):
        Ledger(path, "others").charge(an_event(2))
    for name in ("", "a\nb", "x" * 300, 5):
        with pytest.raises(LedgerError, match="population"):
            Ledger(path, name)  # type: ignore[arg-type]


def test_no_line_has_a_time_and_each_field_was_decided_on(path: Path) -> None:
    """A line of every kind. Of one run's times another one's would follow, so that it is all kinds and every q."""
    of(path).charge(an_event(1), Budget(50.0, 1e-3))
    of(path).charge(an_event(2, q=0.5))
    of(path).charge_earlier(Earlier("the adapter of 2025", 5.0, rounds=2))
    tip = path.with_name("ledger.jsonl.tip")
    tip.unlink()
    of(path).adopt("a new disk")
    assert {line["kind"] for line in lines(path)} == {"ledger", "event", "budget", "earlier", "moved"}
    for line in [*lines(path), json.loads(tip.read_text())]:
        assert unlisted("ledger", line) == [] and filtered("ledger", line) == line
    assert fate_of("ledger", "time") == "dropped"


def test_its_time_of_change_is_the_number_of_its_newest_line(path: Path) -> None:
    """A backup that goes by times of change takes each line; nobody learns when a round ended."""
    for round in (1, 2, 3):
        of(path).charge(an_event(round))
        for file in (path, path.with_name("ledger.jsonl.tip")):
            assert file.stat().st_mtime == datetime(1980, 1, 1, 12, 0, round, tzinfo=UTC).timestamp()


def test_a_link_to_the_ledger_is_the_ledger(path: Path, tmp_path: Path) -> None:
    of(path).charge(an_event(1))
    (tmp_path / "link.jsonl").symlink_to(path)
    assert of(tmp_path / "link.jsonl").charge(an_event(2)).number == 2
    assert len(of(path).events()) == 2 and (tmp_path / "link.jsonl").is_symlink()


def test_two_processes_charge_at_once(path: Path, program: Callable[..., Program]) -> None:
    """By definition: every charge of both is there once, in one chain."""
    both = [program(ROUNDS, "charge", path.parent, run, 6) for run in ("one", "two")]
    assert [each.ended().returncode for each in both] == [0, 0]
    events = of(path).events()
    assert [charged.number for charged in events] == list(range(1, 13))
    assert sorted((c.event.run, c.event.round) for c in events) == [(r, k) for r in ("one", "two") for k in range(1, 7)]


@PLD
def test_two_processes_cannot_spend_one_budget_twice(path: Path, program: Callable[..., Program]) -> None:
    """At delta 1e-3, 2 rounds of z = 1 are within 5.5, and 3 are not (asked of `epsilon`, which has oracles)."""
    assert epsilon(1.0, 2, 1e-3) < 5.5 < epsilon(1.0, 3, 1e-3)
    both = [program(ROUNDS, "spend", path.parent, run, 5.5) for run in ("one", "two")]
    told = [json.loads(each.ended().stdout) for each in both]
    assert sum(found["spent"] for found in told) == 2 == len(of(path).events())


def test_another_process_s_lock_is_waited_for_and_not_for_ever(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locked_file, "PATIENCE", 0.1)
    of(path).charge(an_event(1))
    with locked_file.held(path), pytest.raises(LedgerError, match="another process has held"):
        of(path).charge(an_event(2))
    assert of(path).charge(an_event(2)).number == 2


def test_a_system_without_locks_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(descriptor: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    with monkeypatch.context() as patched:
        patched.setattr(locked_file.fcntl, "flock", none)
        with pytest.raises(LedgerError):
            of(path).charge(an_event(1))
    monkeypatch.setattr(locked_file, "fcntl", None)
    with pytest.raises(LedgerError, match="needs file locks"):
        of(path).charge(an_event(1))


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
    assert of(path).charge(an_event(2)).number == 2


def test_a_disk_that_does_not_keep_what_was_flushed_is_heard(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of(path).charge(an_event(1))

    def broken(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", broken)
        for event in (an_event(2), an_event(1)):  # a new one, and one whose writer may not have flushed it
            with pytest.raises(LedgerError, match="Input/output error"):
                of(path).charge(event)
    assert len(of(path).events()) == 1


@pytest.mark.parametrize(
    "changed",
    [{"round": 0}, {"round": True}, {"rounds": 0}, {"rounds": 10**9}, {"sampling": 0.0}, {"sampling": 2.0}, {"run": ""},
     {"run": "a\nb"}, {"noise_multiplier": 0.0}, {"delta": 0.0}, {"released": "short"}, {"sensitivity": 1.0},
     {"size": 0}, {"clip": float("nan")}, {"grid": 0.5}, {"grid": 0.3}, {"noise_multiplier": 1e300}],
)  # fmt: skip
def test_impossible_events(changed: dict[str, Any], path: Path) -> None:
    """Neither made nor read: a ledger with such a line is refused."""
    with pytest.raises(HyperparameterError):
        Event(**{**an_event(1).plain(), **changed})
    with pytest.raises(LedgerError, match="impossible event"):
        Event.from_plain({**an_event(1).plain(), **changed})


def test_what_is_no_event_is_refused(path: Path) -> None:
    plain = an_event(1).plain()
    for bad in ({}, {**plain, "more": 1}, {**plain, "round": "1"}, {**plain, "clip": [1]}, {**plain, "size": 10**400}):
        with pytest.raises(LedgerError):
            Event.from_plain(copy.deepcopy(bad))
    with pytest.raises(LedgerError, match="digest"):
        of(path).charge(Event(**{**plain, "released": ""}))
    for most, delta in ((0, 1e-5), (float("nan"), 1e-5), (1, 0)):
        with pytest.raises(HyperparameterError):
            Budget(most, delta)
    with pytest.raises(LedgerError, match="cannot be read"):
        recompute(path)
    path.write_text("nothing")
    with pytest.raises(LedgerError, match="holds no ledger"):
        recompute(path)
