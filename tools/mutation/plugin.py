"""pytest's side: notes which places each test passes, or tries changes in forks of the process that has collected.

MUTATION_NOTES names a folder where each worker notes what its tests pass. Otherwise MUTATION_TASKS names a file of
tasks (`killing.py` writes it), and where their outcomes go.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from mutation import stored, switch

MEMORY = 6 << 30  # bytes that a change may take, beyond what the process has
ENDLESS = 60  # seconds of work after which a child that goes on beyond its time is ended
STUCK = 300  # seconds of the clock after which a child that goes on beyond its time is ended

_notes = os.environ.get("MUTATION_NOTES")
_tasks = os.environ.get("MUTATION_TASKS")
_fixtures: dict[Any, set[int]] = {}
switch.install([tried.change for tried in stored.read()])


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any) -> Iterator[None]:
    """What a fixture passes when it is made, all tests that use it pass."""
    before, switch.passed = switch.passed, set()
    try:
        return (yield)
    finally:
        _fixtures[fixturedef] = set(switch.passed)
        switch.passed |= before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: Any) -> Iterator[None]:
    """One line for each test that passes: its name, its seconds, the places."""
    if _notes is None:
        return (yield)
    switch.passed, began = set(), time.perf_counter()
    done = yield
    of_fixtures = (_fixtures.get(made, set()) for defs in item._fixtureinfo.name2fixturedefs.values() for made in defs)
    found = switch.passed.union(*of_fixtures)
    seconds = time.perf_counter() - began
    if found and not getattr(item, "failed_here", False):
        with (Path(_notes) / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps([item.nodeid, round(seconds, 3), sorted(found)]) + "\n")
    return done


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Iterator[Any]:
    report = yield
    item.failed_here = getattr(item, "failed_here", False) or report.failed
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: Any) -> bool | None:
    if _tasks is None:
        return None
    items = {item.nodeid: item for item in session.items}
    tasks, running = list(json.loads(Path(_tasks).read_text())), {}
    workers = int(os.environ.get("MUTATION_WORKERS", "2"))
    while tasks or running:
        while tasks and len(running) < workers:
            task = tasks.pop(0)
            running[_forked(task, items)] = (task, time.monotonic())
        time.sleep(0.05)
        for child, (task, began) in list(running.items()):
            if time.monotonic() - began > task["seconds"] + STUCK:
                os.kill(child, 9)
            if os.waitpid(child, os.WNOHANG)[0]:
                del running[child]
    return True


def _forked(task: Mapping[str, Any], items: Mapping[str, Any]) -> int:
    child = os.fork()
    if child:
        return child
    os.setsid()
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (int(task["seconds"]) + ENDLESS, int(task["seconds"]) + ENDLESS))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    try:
        with open(task["out"], "w", buffering=1) as out:
            _try(task, [items[name] for name in task["cases"] if name in items], out)
    except BaseException as error:
        with open(task["out"], "a") as out:
            out.write(json.dumps(["broke", repr(error)[:200], 0.0]) + "\n")
    finally:
        os._exit(0)


def _try(task: Mapping[str, Any], cases: Sequence[Any], out: Any) -> None:
    """Each case with the change, until enough functions have failed or the time is over. A case that ends the process
    is the last one that began."""
    began, found = _work(), set()
    switch.made = task["number"]
    sys.setrecursionlimit(3000)
    for k, item in enumerate(cases):
        if stored.function_of(item.nodeid) in found:
            continue
        out.write(json.dumps(["began", item.nodeid, _work() - began]) + "\n")
        item.failed_here = False
        item.ihook.pytest_runtest_protocol(item=item, nextitem=cases[k + 1] if k + 1 < len(cases) else None)
        failed = item.failed_here
        out.write(json.dumps(["failed" if failed else "passed", item.nodeid, _work() - began]) + "\n")
        if failed:
            found.add(stored.function_of(item.nodeid))
        if len(found) >= task["enough"]:
            break
        if _work() - began > task["seconds"]:
            out.write(json.dumps(["time", "", _work() - began]) + "\n")
            return
    out.write(json.dumps(["end", "", _work() - began]) + "\n")


def _work() -> float:
    """Seconds that processors gave to this process and its children: a busy machine changes no verdict."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system
