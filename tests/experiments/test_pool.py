"""Tasks in processes that may die. Kind: end-to-end, on real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fedlora.experiments.gpus import begin
from fedlora.experiments.pool import Process, run_in_slots
from support.pool_tasks import die_so_often, lives, nothing, sleep_long, square, visible_gpus

TESTS = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at processes in /proc"),
    pytest.mark.usefixtures("forked"),  # the code under test would start such a server with less in it
]


def played(
    function: Callable[[Any], Any], tasks: Iterable[Any], watch: Callable[[Any], None] = lambda running: None
) -> Generator[Any, None, None]:
    return run_in_slots(function, iter(tasks), [Process(nothing), Process(nothing)], watch=watch)


def until(ready: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


def test_every_task_is_run_once_and_an_exception_is_a_result() -> None:
    """By hand: the squares of 1, 2 and 4; -1 raises. None, twice: there is nothing to start yet."""
    seen: list[Any] = []
    found = dict(played(square, [None, 1, 2, -1, None, 4], watch=seen.append))
    error = found.pop(-1)
    assert isinstance(error, ValueError) and str(error) == "-1 is below zero"
    assert found == {1: 1, 2: 4, 4: 16} and seen[0] == []


def test_a_task_whose_process_dies_is_run_again_and_a_second_time_is_a_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As often as each says: the files hold a letter for each try. The neighbours lose nothing. The log names each
    replacement."""
    tasks = [(tmp_path / name, times) for name, times in (("a", 0), ("once", 1), ("twice", 2), ("b", 0))]
    found = {path.name: result for (path, _), result in played(die_so_often, tasks)}
    assert isinstance(found.pop("twice"), BrokenProcessPool)
    assert found == {name: name for name in ("a", "once", "b")}
    assert {path.name: len(path.read_text()) for path, _ in tasks} == {"a": 1, "once": 2, "twice": 2, "b": 1}
    assert caplog.text.count("a worker process died") == 2


def test_each_process_sees_its_own_gpu() -> None:
    """Each is asked what a library would read there."""
    slots = [Process(partial(begin, gpus)) for gpus in ("5", "7")]
    found = list(run_in_slots(visible_gpus, iter([0.5, 0.6]), slots, watch=lambda running: None))
    assert sorted(found) == [(0.5, "5"), (0.6, "7")]


def test_closing_ends_what_runs_at_once(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]

    def stop(running: Any) -> None:
        if all(path.exists() for path in files):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(played(sleep_long, files, watch=stop))
    assert not [path for path in files if lives(int(path.read_text()))]


def test_an_interrupt_while_it_ends_is_raised_when_all_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the last task and the end of its processes, as it was met on a slow machine: a half closed executor is
    woken when Python ends, and its traceback stands on the screen."""
    ended: list[object] = []
    end = Process.end

    def interrupted(slot: Process) -> None:
        if not ended:
            ended.append(None)
            raise KeyboardInterrupt
        end(slot)
        ended.append(slot)

    monkeypatch.setattr(Process, "end", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(played(square, [1, 2]))
    assert len(ended) == 3 and len(set(ended)) == 3


def test_the_processes_end_when_the_one_that_asked_is_killed(tmp_path: Path) -> None:
    """kill -9 in the middle of a task: nobody can clean up, and nobody has to."""
    code = f"""
from pathlib import Path
from fedlora.experiments import pool
from fedlora.experiments.pool import Process, run_in_slots
from support.pool_tasks import nothing, sleep_long
pool._IMPORTED = ()  # what runs import, these need not
if __name__ == "__main__":
    tasks = [Path({str(tmp_path)!r}) / name for name in "ab"]
    slots = [Process(nothing), Process(nothing)]
    list(run_in_slots(sleep_long, iter(tasks), slots, watch=lambda running: None))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment)
    files = [tmp_path / "a", tmp_path / "b"]
    until(lambda: all(path.exists() for path in files))
    processes = [int(path.read_text()) for path in files]
    assert all(lives(process) for process in processes)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until(lambda: not any(lives(process) for process in processes), seconds=10)
