"""Which process has which run, in a folder without locks of the file system. Kind: end-to-end, on real processes."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedlora.errors import CheckpointError, ConfigError
from fedlora.experiments import leases, pool, runner
from fedlora.experiments.comparison import ComparedRuns
from fedlora.experiments.leases import Claims, alone
from fedlora.experiments.places import Places
from fedlora.experiments.plan import PlannedRun
from fedlora.experiments.runner import Outcome, run_all


@pytest.fixture(autouse=True)
def _no_kernel_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Lustre without the option flock."""

    def refused(*_: object) -> None:
        raise OSError(errno.ENOSYS, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refused)
    monkeypatch.setattr(fcntl, "lockf", refused)


def test_a_run_is_with_one_and_free_when_it_leaves_it(tmp_path: Path) -> None:
    with Claims(tmp_path) as one, Claims(tmp_path) as other:
        assert one.take("a") and not other.take("a") and other.take("b") and not one.take("b")
        one.leave("a")
        assert other.take("a")
    with Claims(tmp_path) as third:
        assert third.take("a") and third.take("b"), "a `with` block leaves them all"


def test_a_file_system_without_hard_links_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a memory stick, and some that keep files at a cloud."""

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    with Claims(tmp_path) as claims, pytest.raises(ConfigError, match=f"{tmp_path} .*--work"):
        claims.take("a")


def test_a_killed_holder_loses_its_run_after_three_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked process takes it and is gone without a word: first it is refused, and after 3 x 0.1 s it is ours."""
    monkeypatch.setattr(leases, "BEAT", 0.1)
    if not (child := os.fork()):
        Claims(tmp_path).take("a")
        os._exit(0)
    os.waitpid(child, 0)
    with Claims(tmp_path) as other:
        began = time.monotonic()
        assert not other.take("a")
        while not other.take("a"):
            time.sleep(0.02)
        assert 0.3 <= time.monotonic() - began < 5


def test_a_file_that_somebody_holds_for_ever_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its holder was killed on another machine, where nobody here can look."""
    monkeypatch.setattr(leases, "_BRIEF", 0.2)
    with alone(tmp_path / ".lock"):
        held = (tmp_path / ".lock").read_text()
    assert not (tmp_path / ".lock").exists()
    (tmp_path / ".lock").write_text(held.replace("host=", "host=other-"))
    why = rf"\.lock .* 0\.2 s .* process {os.getpid()} of other-"
    with pytest.raises(CheckpointError, match=why), alone(tmp_path / ".lock"):
        pass


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Digests of runs, in the order in which they were run: in no time."""
    made: list[str] = []

    def run(places: Places, run: PlannedRun, tick: object) -> Outcome:
        made.append(run.digest)
        return Outcome(run, 0.0, None)

    monkeypatch.setattr(runner, "_run", run)
    monkeypatch.setattr(runner, "LOOK", 0.01)
    monkeypatch.setattr(pool, "LOOK", 0.01)
    monkeypatch.setattr(Places, "done", lambda self, run: run.digest in made)
    yield made


def planned(digest: str) -> PlannedRun:
    return PlannedRun({}, 0, None, False, None, digest)  # type: ignore[arg-type]


def test_machines_that_share_the_folder_of_a_comparison_share_its_claims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the claims were in each machine's own temporary folder, so two machines made every run twice."""
    here = ComparedRuns.at(tmp_path / "out").claims
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "of the other"))
    with Claims(here) as one, Claims(ComparedRuns.at(tmp_path / "out").claims) as other:
        assert one.take("a") and not other.take("a")


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_that_another_process_has_comes_last_and_is_not_run_twice(
    tmp_path: Path, made: list[str], finished: bool
) -> None:
    """Another process has a of a, b, c. While nothing else is left, the first waits, and says so; then the other one
    ends it, or leaves it as it is."""
    places, said = Places(tmp_path, tmp_path, None), []
    with Claims(places.claims) as other:
        assert other.take("a")

        def waits() -> None:
            said.append([*made])
            if len(said) == 3:
                made.extend(["a"] * finished)
                other.leave("a")

        outcomes = [*run_all([*map(planned, "abc")], places, waits=waits)]
    assert [outcome.run.digest for outcome in outcomes] == ["b", "c", "a"] and said == [["b", "c"]] * 3
    assert made == ["b", "c", "a"], "one of the two ran it, once"
    assert (outcomes[-1].seconds is None) == finished and outcomes[0].seconds is not None


def test_an_interrupt_leaves_every_run(tmp_path: Path, made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    places = Places(tmp_path, tmp_path, None)
    one = run_all([*map(planned, "abc")], places)
    assert next(one).run.digest == "a"
    one.close()
    with Claims(places.claims) as other:
        assert all(map(other.take, "abc"))


def test_a_process_that_slept_stops_if_another_one_has_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked process is stopped in the middle of a run, as a machine that is suspended. Another one takes the run
    over after three beats; the first one wakes up, and hears of it in one of its next rounds."""
    monkeypatch.setattr(leases, "BEAT", 0.1)
    places, rounds = Places(tmp_path, tmp_path, None), tmp_path / "rounds"

    def slow(places: Places, run: PlannedRun, tick: runner.Tick) -> Outcome:
        for round in range(1000):
            rounds.write_text(str(round))
            tick(run, round)
            time.sleep(0.02)
        return Outcome(run, 0.0, None)

    monkeypatch.setattr(runner, "_run", slow)
    monkeypatch.setattr(Places, "done", lambda self, run: False)
    if not (child := os.fork()):
        try:
            list(run_all([planned("a")], places))
        except CheckpointError as error:
            os._exit(7 if " 0.3 s" in str(error) and " run a:" in str(error) else 8)
        finally:
            os._exit(9)
    while not rounds.exists():
        time.sleep(0.02)
    os.kill(child, signal.SIGSTOP)
    with Claims(places.claims) as other:
        while not other.take("a"):
            time.sleep(0.02)
        os.kill(child, signal.SIGCONT)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        other.check()
    assert int(rounds.read_text()) < 500
