"""Processes with a resident: order, laziness, sharing, death, and that nothing is left running.

Expected values are hand-computed. Processes are real; the kills are SIGKILL and SIGINT.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from fedlora.errors import HyperparameterError, UploadRefused
from fedlora.workers import Processes
from fedlora.workers.processes import Died, available
from support import in_processes as work


def test_results_come_in_order_from_several_processes_with_one_thread_each() -> None:
    with Processes({}, 2, begin=work.number) as processes:
        found: list[Any] = list(processes.map(work.who, [0.3, 0.0, 0.2, 0.0, 0.1, 0.0]))
    assert [item for item, *_ in found] == [0.3, 0.0, 0.2, 0.0, 0.1, 0.0]
    assert len({pid for _, pid, *_ in found}) == 2 and os.getpid() not in {pid for _, pid, *_ in found}
    assert {threads for *_, threads, _ in found} == {1}
    assert {mine for *_, mine in found} == {0, 1}


def test_items_are_drawn_a_few_ahead_and_no_more() -> None:
    """Two processes: four in hand; one more for each that is done."""
    drawn = []

    def items() -> Iterator[int]:
        for k in range(50):
            drawn.append(k)
            yield k

    with Processes({"base": 10}, 2) as processes:
        results = processes.map(work.add, items())
        assert drawn == []
        assert next(results) == 10 and len(drawn) == 5
        assert next(results) == 11 and len(drawn) == 6
        assert list(results) == list(range(12, 60))


def test_a_copy_may_be_changed_and_stays_in_its_process() -> None:
    resident = {"asked": 0}
    with Processes(resident, 1) as processes:
        assert list(processes.map(work.count_up, [0, 0, 0])) == [1, 2, 3]
    assert resident == {"asked": 0}


def test_only_what_is_named_is_shared() -> None:
    """Sums by hand: 12 ones, then one added to each in its own process; the others and this one see nothing of it."""
    frozen, own = nn.Parameter(torch.ones(3, 4), requires_grad=False), torch.ones(3, 4)
    with Processes({"frozen": frozen, "own": own, "tied": frozen}, 2, shared=[frozen]) as processes:
        assert list(processes.map(work.address, ["frozen", "own", "tied"])) == [(True, 12), (False, 12), (True, 12)]
        assert sorted(processes.map(work.write, ["own"] * 4))[0] == 24
        assert frozen.is_shared() and not own.is_shared()
        assert float(own.sum()) == 12 and float(frozen.sum()) == 12
        [seen] = processes.map(work.write, ["tied"])  # what nobody may do: it shows that the memory is one
        assert seen == 24 and float(frozen.detach().sum()) == 24


def test_what_the_work_raises_is_raised_here_with_where_it_was() -> None:
    with Processes(None, 1) as processes:
        with pytest.raises(UploadRefused, match="client 'site-1' refused: no") as refused:
            list(processes.map(work.fail, ["ours"]))
        assert refused.value.client == "site-1"
        with pytest.raises(ValueError, match="seven") as failed:
            list(processes.map(work.fail, ["value"]))
        assert "in_processes.py" in failed.value.__notes__[0]
        with pytest.raises(RuntimeError, match="Unpicklable: odd x"):
            list(processes.map(work.fail, ["odd"]))


def test_a_dead_process_loses_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One item kills its process once, another twice: both are done in the end, and so is everything else."""
    items = [("x", 0), ("once", 1), ("y", 0), ("twice", 2), *((f"z{k}", 0) for k in range(5))]
    with Processes(tmp_path, 2) as processes:
        found = list(processes.map(work.die, items))
    assert found == [f"{name} after {times}" for name, times in items]
    assert "a worker process died" in caplog.text


def test_what_always_kills_its_process_is_named_and_the_rest_is_done(tmp_path: Path) -> None:
    items = [("x", 0), ("always", 0), *((f"z{k}", 0) for k in range(6))]
    with Processes(tmp_path, 2) as processes:
        found = list(processes.map(work.die, items))
    assert isinstance(found[1], Died) and re.search(r"died \d times, at last", found[1].reason)
    assert [f for k, f in enumerate(found) if k != 1] == ["x after 0", *(f"z{k} after 0" for k in range(6))]


def test_what_cannot_start_says_why() -> None:
    with Processes(None, 2, begin=work.no_start) as processes, pytest.raises(HyperparameterError, match="no GPU here"):
        list(processes.map(work.add, [1]))
    dying = Processes(None, 1, begin=work.die_at_start)
    with dying, pytest.raises(HyperparameterError, match="die at their start"):
        list(dying.map(work.add, [1, 2]))
    with pytest.raises(HyperparameterError, match="does not pickle"):
        Processes(lambda: None, 2)


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_sizes_are_whole_numbers(size: Any) -> None:
    with pytest.raises(HyperparameterError, match="size must be"):
        Processes(None, size)
    with pytest.raises(HyperparameterError, match="threads must be"):
        Processes(None, 1, threads=size)


def test_closed_processes_are_gone_and_start_again() -> None:
    processes = Processes({}, 2)
    first = {pid for _, pid, *_ in processes.map(work.who, [0.1] * 4)}  # type: ignore[misc]
    processes.close()
    assert not any(psutil.pid_exists(pid) for pid in first)
    second = {pid for _, pid, *_ in processes.map(work.who, [0.1] * 4)}  # type: ignore[misc]
    processes.close()
    assert not first & second


def test_a_script_that_does_its_work_as_a_worker_imports_it_is_told_so(tmp_path: Path) -> None:
    """By the worker that would do it again, and by the program itself: as it stood, another lock or a broken pipe."""
    script = tmp_path / "script.py"
    script.write_text("from fedlora.workers import Processes\nimport operator\n"
                      "with Processes([1], 2) as p:\n    print(list(p.map(operator.getitem, [0])))\n")  # fmt: skip
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and done.stdout == ""
    assert "imports the script" in done.stderr
    assert "die at their start" in done.stderr.splitlines()[-1]


def test_there_is_a_core_for_each_that_is_available() -> None:
    assert available() == len(os.sched_getaffinity(0)) >= 1


def test_too_little_shared_memory_is_said_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10})())
    with pytest.raises(HyperparameterError, match=r"0.0004 MB of shared memory.*1e-05 MB left.*--shm-size"):
        Processes(None, 2, shared=[torch.ones(100)])


def test_what_cannot_be_shared_is_refused_and_left_alone() -> None:
    """It would be made contiguous in the caller's own model."""
    turned = torch.ones(3, 4).T
    with pytest.raises(HyperparameterError, match=r"shape \(4, 3\) .*not contiguous"):
        Processes({"turned": turned}, 2, shared=[turned])
    assert turned.stride() == (1, 4)
    whole = torch.ones(10)
    with pytest.raises(HyperparameterError, match="overlap in memory"):
        Processes(None, 2, shared=[whole[:6], whole[4:]])
    Processes(None, 2, shared=[whole[:5], whole[5:], whole[:5]])


SLEEPERS = """
    import multiprocessing, os, signal, sys
    from multiprocessing import resource_tracker
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell started in the background ignores
    sys.path[:0] = {path!r}
    from fedlora.workers import Processes
    from support import in_processes as work

    if __name__ == "__main__":
        resource_tracker.ensure_running()  # else it is started with the server, and lets go of the signal
        with Processes({{}}, 2) as processes:
            pids = {{pid for _, pid, *_ in processes.map(work.who, [0.3] * 4)}}
            context = multiprocessing.get_context("forkserver")
            here, there = context.Pipe()
            child = context.Process(target=work.mask, args=(there,))
            child.start()
            print("held" if here.recv() else "free", *pids, flush=True)
            child.join()
            for _ in processes.map(work.asleep_or_stuck, [0, 1, 0, 1]):
                pass
"""


@pytest.mark.quick(1)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_behind(how: signal.Signals, tmp_path: Path) -> None:
    """Killed in the middle of work that would take ten minutes, of one worker that sleeps and one that gives no other
    thread a turn: workers and their server are gone in seconds. And while they work, the server, the program's first,
    does not hold back SIGINT: what it forks for others hears of Ctrl-C."""
    script = tmp_path / "sleepers.py"
    here = [str(Path(work.__file__).parents[1])]
    script.write_text(textwrap.dedent(SLEEPERS.format(path=here)))
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as parent:
        assert parent.stdout is not None
        mask, *pids = parent.stdout.readline().split()
        workers = [int(pid) for pid in pids]
        assert mask == "free" and len(workers) == 2
        family = [*workers, *(child.pid for child in psutil.Process(parent.pid).children())]
        time.sleep(0.3)
        parent.send_signal(how)
        parent.wait(20)
        until = time.monotonic() + 20
        while (left := [pid for pid in family if psutil.pid_exists(pid)]) and time.monotonic() < until:
            time.sleep(0.1)
    assert left == []
