"""Processes with a resident: order, laziness, memory, death, and that nothing is left running.

Expected values are hand-computed. Processes are real; the kills are SIGKILL and SIGINT.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from fedlora.errors import HyperparameterError, UploadRefused, WorkerDied
from fedlora.workers import Processes
from support import in_processes as work


def test_results_come_in_order_from_several_processes_with_one_thread_each() -> None:
    with Processes({}, 2, begin=work.number) as processes:
        found: list[Any] = list(processes.map(work.who, [0.3, 0.0, 0.2, 0.0, 0.1, 0.0]))
    assert [item for item, *_ in found] == [0.3, 0.0, 0.2, 0.0, 0.1, 0.0]
    assert len({pid for _, pid, *_ in found}) == 2 and os.getpid() not in {pid for _, pid, *_ in found}
    assert {threads for *_, threads, _ in found} == {1}
    assert {mine for *_, mine in found} == {0, 1}


def test_items_are_drawn_a_few_ahead_and_no_more() -> None:
    """Two processes, so four ahead of what has been taken."""
    drawn = []

    def items() -> Iterator[int]:
        for k in range(50):
            drawn.append(k)
            yield k

    with Processes({"base": 10}, 2) as processes:
        results = processes.map(work.add, items())
        assert drawn == []
        for taken in range(3):
            assert next(results) == 10 + taken and len(drawn) <= taken + 4
        assert list(results) == list(range(13, 60))


def test_copies_cost_no_memory_until_they_are_written() -> None:
    """Two copies of 200 MB: read, they are the owner's pages; each one's own after it wrote. The sums are by hand."""
    resident = {"base": torch.ones(50_000_000)}
    with Processes(resident, 2) as processes:
        read = list(processes.map(work.own_megabytes, [("base", 0.0)] * 4))
        written = list(processes.map(work.own_megabytes, [("base", 1.0)] * 2))
    assert {total for total, _ in read} == {50_000_000} and max(own for _, own in read) < 50
    assert max(own for _, own in written) > 190 and float(resident["base"].sum()) == 50_000_000


def test_a_server_shares_the_tensors_of_what_it_is_given() -> None:
    """For GPUs, where `begin` moves them. Sums by hand: 12 ones, of which a process sees the other's writing."""
    with Processes({"base": torch.ones(3, 4)}, 2, server=["fedlora.workers.processes"]) as processes:
        assert list(processes.map(work.address, ["base"] * 2)) == [(True, 12)] * 2
        assert list(processes.map(work.write, ["base"])) == [24]
        assert list(processes.map(work.address, ["base"] * 2)) == [(True, 24)] * 2


def test_a_fork_works_whatever_threads_its_owner_had() -> None:
    """Two threads each of OpenMP, of BLAS and of autograd, with another thread of Python's at work meanwhile."""
    script = """
    import threading, torch
    from support import in_processes as work
    from fedlora.workers import Processes
    torch.set_num_threads(2)
    over = threading.Event()
    busy = threading.Thread(target=lambda: [print(end="", flush=True) for _ in iter(over.is_set, True)], daemon=True)
    busy.start()
    want = work.trained({}, 0)
    with Processes({}, 2) as processes:
        found = list(processes.map(work.trained, range(4)))
    over.set()
    print(len(found), all(abs(one - want) < 1e-4 * abs(want) for one in found))
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(work.__file__).parents[1]), *sys.path])}
    environment.pop("OMP_NUM_THREADS", None)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=600, check=True,
        env=environment,
    )  # fmt: skip
    assert done.stdout.strip() == "4 True"


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


def test_a_dead_process_costs_its_own_item_alone() -> None:
    """Also the first one, and all at once; the next work finds as many processes as before."""
    items = ["dies", "x", "dies", *(f"z{k}" for k in range(5))]
    with Processes(None, 2) as processes:
        for _ in range(2):
            found = list(processes.map(work.die, items))
            assert [isinstance(result, WorkerDied) for result in found] == [name == "dies" for name in items]
            assert "out of memory?" in str(found[0]) and [found[1], *found[3:]] == [items[1], *items[3:]]


def _gone(pids: Iterable[int], seconds: float = 20) -> bool:
    until = time.monotonic() + seconds
    while (left := [pid for pid in pids if psutil.pid_exists(pid)]) and time.monotonic() < until:
        time.sleep(0.05)
    return not left


def test_what_cannot_start_says_why() -> None:
    for begin in (work.no_start, work.die_at_start):
        with Processes(None, 2, begin=begin) as dying, pytest.raises(HyperparameterError, match="die at their start"):
            list(dying.map(work.add, [1, 2]))


def _asleep(server: list[str] | None, to: Any) -> None:
    """Works for two minutes."""
    with Processes({}, 2, server=server) as processes:
        to.send({pid for _, pid, *_ in processes.map(work.who, [0.3] * 4)})  # type: ignore[misc]
        list(processes.map(work.who, [60.0] * 4))


@pytest.mark.quick(1)
@pytest.mark.parametrize("server", [None, ["fedlora.workers.processes"]], ids=["fork", "server"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_behind(how: signal.Signals, server: list[str] | None, forked: Any) -> None:
    """Killed in the middle of their work: workers and their server are gone in seconds."""
    here, there = forked.Pipe(duplex=False)
    parent = forked.Process(target=_asleep, args=(server, there))
    parent.start()
    workers = here.recv()
    assert len(workers) == 2
    family = [*workers, *(child.pid for child in psutil.Process(parent.pid).children())]
    time.sleep(0.3)
    os.kill(parent.pid, how)
    parent.join(20)
    assert parent.exitcode and _gone(family)
