"""Run what is missing of an experiment: finished runs are skipped, interrupted ones resumed, failures kept apart."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from fedlora.core import files
from fedlora.errors import DataError, FedLoRAError
from fedlora.experiments.plan import PlannedRun, mains, searches
from fedlora.experiments.pool import run_in_processes
from fedlora.experiments.results import Result, read_results, summarise, write_result
from fedlora.experiments.spec import Experiment
from fedlora.runs.folder import RunFolder
from fedlora.runs.quiet import quiet_libraries

Tick = Callable[[PlannedRun, int], None]


class Keeper(Protocol):
    """Knows where runs and their results are. `Places` is one for experiments, `comparison.Comparison` another."""

    @property
    def data_root(self) -> Path | None: ...

    def folder(self, run: PlannedRun) -> RunFolder:
        """Where the run is, or will be."""

    def finished(self, *, unclean: bool = False) -> Mapping[str, Result]:
        """Digest -> result; with `unclean`, also those of a changed checkout."""

    def keep(self, run: PlannedRun, wall_seconds: float) -> None:
        """Note a finished run."""

    def failed(self, run: PlannedRun, error: Exception) -> None:
        """Note a failed run."""


@dataclass(frozen=True)
class Places:
    """Where things are. results: finished runs of a clean checkout. work: run folders, failures, unclean results."""

    results: Path
    work: Path
    data_root: Path | None

    @property
    def unclean(self) -> Path:
        """Results of code that no commit describes: they never stand beside the others."""
        return self.work / "unclean"

    def folder(self, run: PlannedRun) -> RunFolder:
        return RunFolder(self.work / "runs" / run.digest)

    def failure(self, digest: str) -> Path:
        return self.work / "failures" / f"{digest}.json"

    def finished(self, *, unclean: bool = False) -> dict[str, Result]:
        """Digest -> result; with `unclean`, also those of a changed checkout."""
        found = read_results(self.unclean) if unclean else {}
        return found | read_results(self.results)

    def keep(self, run: PlannedRun, wall_seconds: float) -> None:
        result = summarise(self.folder(run), wall_seconds)
        commit = result["commit"]
        write_result(self.results if commit and commit["clean"] else self.unclean, result)
        self.failure(run.digest).unlink(missing_ok=True)

    def failed(self, run: PlannedRun, error: Exception) -> None:
        files.write(self.failure(run.digest), failure_report(run, error))


@dataclass(frozen=True)
class Outcome:
    """What became of one run. error: one line, or None. unfit: the configuration cannot be run, with any seed."""

    run: PlannedRun
    seconds: float
    error: str | None
    unfit: bool = False


def missing(
    experiment: Experiment,
    profile: str,
    places: Keeper,
    seeds: Sequence[int] | None = None,
    failed: Collection[str] = (),
) -> list[PlannedRun]:
    """The runs that can be started now: of the search, or, where it is done for a cell, of the cell. failed: digests of
    runs of the search that it goes without."""
    done = places.finished(unclean=True)
    wanted = [*searches(experiment, profile), *mains(experiment, profile, done, failed)]
    found: dict[str, PlannedRun] = {}
    for run in wanted:
        if run.digest not in done and (seeds is None or run.searching or run.seed in seeds):
            found.setdefault(run.digest, run)
    return list(found.values())


def run_all(
    runs: Sequence[PlannedRun],
    places: Keeper,
    *,
    workers: int = 1,
    tick: Tick | None = None,
    wanted: Callable[[PlannedRun], bool] = lambda run: True,
) -> Generator[Outcome, None, None]:
    """Run them, yielding each outcome as it comes. Close the iterator to end what still runs.

    Args:
        workers: processes; each uses the threads that a run's configuration names. With 1, all is in this process.
        tick: called with a run and its newest round.
        wanted: asked before a run is started; one that is not wanted is left out.
    """
    if workers == 1:
        for run in runs:
            if wanted(run):
                yield _one(places, run, tick)
        return

    def watch(running: Sequence[PlannedRun]) -> None:
        if tick is not None:
            for run in running:
                tick(run, len(places.folder(run).metrics()))

    function = partial(_one, places)
    for run, result in run_in_processes(function, runs, workers, begin=quiet_libraries, wanted=wanted, watch=watch):
        yield result if isinstance(result, Outcome) else _lost(run, places, result)


def failure_report(run: PlannedRun, error: Exception) -> str:
    """What went wrong, with the traceback, as JSON."""
    report = {
        "digest": run.digest,
        "label": run.label,
        "error": f"{type(error).__name__}: {error}",
        "traceback": "".join(traceback.format_exception(error)),
    }
    return json.dumps(report, indent=2) + "\n"


def _lost(run: PlannedRun, places: Keeper, error: object) -> Outcome:
    """A run that never came back from its process."""
    why = f"{type(error).__name__}: {error}"
    if isinstance(error, BrokenProcessPool):
        why = "its process was killed twice, perhaps for want of memory (try fewer --workers)"
    places.failed(run, RuntimeError(why))
    return Outcome(run, 0.0, why)


def _one(places: Keeper, run: PlannedRun, tick: Tick | None = None) -> Outcome:
    """One run in this process."""
    from fedlora.runs.execution import execute
    from fedlora.runs.preparation import prepare  # transformers: only the processes that run need it

    began, prepared = time.perf_counter(), None
    if tick is not None:
        tick(run, 0)
    try:
        prepared = prepare(run.config, places.data_root)
        for record in execute(prepared, places.folder(run), resume=True):
            if tick is not None:
                tick(run, record.round)
        places.keep(run, time.perf_counter() - began)
    except Exception as error:  # one failing run must not end the others
        places.failed(run, error)
        unfit = prepared is None and isinstance(error, FedLoRAError) and not isinstance(error, DataError)
        kind = "" if isinstance(error, FedLoRAError) else f"{type(error).__name__}: "
        return Outcome(run, time.perf_counter() - began, f"{kind}{error}".splitlines()[0], unfit)
    return Outcome(run, time.perf_counter() - began, None)
