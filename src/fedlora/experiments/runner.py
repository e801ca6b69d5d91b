"""Run what is missing of an experiment: finished runs are skipped, interrupted ones resumed, failures kept apart.

Several processes, also of several machines, may run one experiment in one folder: each run has one process at a time,
and a process that finds a run taken does the others first, then waits for it (`leases`).
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from fedlora.data.demo import PACKAGED
from fedlora.doing import doing
from fedlora.errors import CheckpointError, FedLoRAError, FilesChanged, WorkerDied
from fedlora.experiments.leases import Claims
from fedlora.experiments.places import Places, by_machine
from fedlora.experiments.plan import PlannedRun
from fedlora.experiments.pool import LOOK, Slot, run_in_slots
from fedlora.experiments.result import content
from fedlora.experiments.runnable import check_private_data
from fedlora.experiments.store import data_of
from fedlora.runs import resuming
from fedlora.runs.folder import RunFolder
from fedlora.runs.inputs import contents
from fedlora.runs.private_simulation import LEDGER, with_ledger

if TYPE_CHECKING:
    from fedlora.runs.preparation import Prepared

Tick = Callable[[PlannedRun, int], None]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one run. seconds: None if another process has done it. error: one line, or None. by_machine: not
    the configuration failed, but the machine."""

    run: PlannedRun
    seconds: float | None
    error: str | None
    by_machine: bool = False


def run_all(
    runs: Sequence[PlannedRun],
    places: Places,
    *,
    slots: Sequence[Slot] = (),
    tick: Tick | None = None,
    wanted: Callable[[PlannedRun], bool] = lambda run: True,
    waits: Callable[[], None] = lambda: None,
) -> Generator[Outcome, None, None]:
    """Run them, and yield each outcome as it comes. Close the iterator to end the runs still going.

    Args:
        slots: where runs go on, one in each at a time. Without any, all is in this process.
        tick: called with a run and its newest round.
        wanted: called before a run is started; False leaves the run out.
        waits: called every now and then while other processes have all runs that are left.

    Raises:
        CheckpointError: this process gave no sign of life for so long that another one may have taken over its run.
    """
    with Claims(places.claims) as claims:

        def checked(run: PlannedRun, round: int) -> None:
            claims.check()
            if tick is not None:
                tick(run, round)

        def watch(running: Sequence[PlannedRun]) -> None:
            claims.check()
            for run in running:
                if (folder := places.folder(run)).path.is_dir():  # a cluster may have no room for it yet
                    checked(run, len(folder.metrics()))
            if not running:
                waits()

        function, tasks = partial(_one, places), _free(runs, claims, wanted)
        each = run_in_slots(function, tasks, slots, watch=watch) if slots else _here(tasks, places, checked, waits)
        with closing(each):
            for run, result in each:
                claims.check()
                claims.leave(run.digest)
                yield result if isinstance(result, Outcome) else _lost(run, places, result)


def _free(
    runs: Sequence[PlannedRun], claims: Claims, wanted: Callable[[PlannedRun], bool]
) -> Iterator[PlannedRun | None]:
    """Each wanted run when it is ours; None after an attempt to get one, if other processes have all that are left."""
    left, refused = deque(runs), 0
    while left:
        run = left.popleft()
        if not wanted(run):
            continue
        if claims.take(run.digest):
            refused = 0
            yield run
            continue
        left.append(run)
        refused += 1
        if refused >= len(left):
            yield None


def _here(
    tasks: Iterator[PlannedRun | None], places: Places, tick: Tick, waits: Callable[[], None]
) -> Generator[tuple[PlannedRun, Outcome], None, None]:
    """As `run_in_slots`, in this process."""
    for run in tasks:
        if run is None:
            waits()
            time.sleep(LOOK)
        else:
            yield run, _one(places, run, tick)


def _check_unchanged(run: PlannedRun) -> None:
    """Raises `FilesChanged` if a file in the run's identity has changed since it was planned."""
    now = contents(run.config) if run.files else {}
    changed = [key for key in now if now[key] != run.files[key]]
    if changed:
        raise FilesChanged(
            f"{', '.join(changed)} changed after the experiment was started, and the result would be told of what "
            f"was there before. Start it again."
        )


def _check_one_kind(run: PlannedRun, manifest: Mapping[str, Any], places: Places) -> None:
    """Raises `FilesChanged` if finished runs had other content of something identified only by its name: a model from
    the hub, data of a task."""
    config = run.config
    model = None if "model.path" in run.files or config.model.path in PACKAGED else config.model.path
    task = None if config.data.task is None or config.privacy is not None else config.data
    for result in places.finished().values() if model or task else ():
        theirs, other = result.settings, ""
        if theirs.model.path == model and result.model != content(manifest["model"]["sha256"]):
            other = f"the model {model!r}"
        dealt = (theirs.data, theirs.clients, theirs.attack, theirs.run.seed)
        if dealt == (task, config.clients, config.attack, config.run.seed) and result.data != data_of(manifest["data"]):
            other = f"the data of data.task = {config.data.task!r}"
        if other:
            raise FilesChanged(
                f"{other} had another content in finished runs (such as {result.digest}) than there is now, and one "
                f"table would be of both. Put back what they read, or run all of them in new folders (--results, "
                f"--work)."
            )


def _note(places: Places, run: PlannedRun, error: Exception) -> None:
    """Store the failure, if the disk still takes it; it is reported in any case."""
    with suppress(OSError):
        places.failed(run, error)


def _lost(run: PlannedRun, places: Places, error: object) -> Outcome:
    """The outcome of a run that never came back from its process."""
    killed = isinstance(error, BrokenProcessPool)
    told = "its process was killed twice, perhaps for want of memory (try fewer --workers)"
    why = told if killed else f"{type(error).__name__}: {error}"
    _note(places, run, WorkerDied(why) if killed else RuntimeError(why))
    return Outcome(run, 0.0, why, by_machine=killed)


def _trained(run: PlannedRun, prepared: Prepared, folder: RunFolder) -> bool:
    """Whether the run is complete already: then its numbers stay those of the code that made them. Raises
    `CheckpointError` if it used other data or another model than the current ones."""
    if prepared.config.privacy is not None or not folder.finished():
        return False
    resuming.changes(folder, prepared.config)
    resuming.check_content(folder, prepared.manifest)
    return True


def _one(places: Places, run: PlannedRun, tick: Tick = lambda run, round: None) -> Outcome:
    """Run one in this process, unless another process has finished it meanwhile."""
    try:
        return Outcome(run, None, None) if places.done(run) else _run(places, run, tick)
    finally:
        gc.collect()  # models have reference cycles, and a process makes many runs


def _run(places: Places, run: PlannedRun, tick: Tick) -> Outcome:
    from fedlora.runs.execution import execute
    from fedlora.runs.preparation import prepare  # imports transformers, only in processes that run
    from fedlora.runs.tracking import Called

    began = time.perf_counter()
    tick(run, 0)
    try:
        check_private_data(run)
        folder = places.folder(run)
        config = with_ledger(run.config, str(folder.path / LEDGER))
        try:
            with doing("reading data and model", closed=config.privacy is not None):
                prepared = prepare(config, places.data_root, places.classes(run))
        finally:  # what fails on half-written data or code says nothing about the planned run
            _check_unchanged(run)
        _check_one_kind(run, prepared.manifest, places)
        trained = _trained(run, prepared, folder)
        if not trained:
            for record in execute(prepared, folder, resume=True, called=Called(run.label, run.experiment)):
                tick(run, record.round)
        places.keep(run, None if trained else time.perf_counter() - began)
    except Exception as error:  # one failing run must not end the others
        _note(places, run, error)
        kind = "" if isinstance(error, FedLoRAError) else f"{type(error).__name__}: "
        why = f"{kind}{error}".splitlines()[0]
        if isinstance(error, CheckpointError):
            why += f" (In an experiment: remove {places.folder(run).path}, and the run begins anew.)"
        return Outcome(run, time.perf_counter() - began, why, by_machine(error))
    return Outcome(run, time.perf_counter() - began, None)
