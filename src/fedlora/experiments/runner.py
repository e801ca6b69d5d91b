"""Run what is missing of an experiment: finished runs are skipped, interrupted ones resumed, failures kept apart."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from fedlora.core import files
from fedlora.experiments.plan import PlannedRun, mains, searches
from fedlora.experiments.results import Result, read_results, summarise, write_result
from fedlora.experiments.spec import Experiment
from fedlora.runs.config import RunConfig, parse_config
from fedlora.runs.folder import RunFolder


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

    def folder(self, digest: str) -> RunFolder:
        return RunFolder(self.work / "runs" / digest)

    def failure(self, digest: str) -> Path:
        return self.work / "failures" / f"{digest}.json"

    def finished(self, *, unclean: bool = False) -> dict[str, Result]:
        """Digest -> result; with `unclean`, also those of a changed checkout."""
        found = read_results(self.unclean) if unclean else {}
        return found | read_results(self.results)


@dataclass(frozen=True)
class Outcome:
    """What became of one run. error: one line, or None."""

    run: PlannedRun
    seconds: float
    error: str | None


def missing(
    experiment: Experiment, profile: str, places: Places, seeds: Sequence[int] | None = None
) -> list[PlannedRun]:
    """The runs that can be started now: of the search, or, where it is done for a cell, of the cell."""
    done = places.finished(unclean=True)
    wanted = [*searches(experiment, profile), *mains(experiment, profile, done)]
    found: dict[str, PlannedRun] = {}
    for run in wanted:
        if run.digest not in done and (seeds is None or run.searching or run.seed in seeds):
            found.setdefault(run.digest, run)
    return list(found.values())


def run_all(
    runs: Sequence[PlannedRun], places: Places, *, workers: int = 1, tick: Callable[[str, int], None] | None = None
) -> Iterator[Outcome]:
    """Run them, yielding each outcome as it comes.

    Args:
        workers: processes; each uses the threads that a run's configuration names.
        tick: called with a run's label and round after each round (with one worker only).
    """
    if workers == 1:
        for run in runs:
            yield _outcome(run, *_one(run.config.canonical(), run.label, places, tick))
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        waiting: Mapping[Future[tuple[float, str | None]], PlannedRun] = {
            pool.submit(_one, run.config.canonical(), run.label, places, None): run for run in runs
        }
        for done in as_completed(waiting):
            yield _outcome(waiting[done], *done.result())


def _outcome(run: PlannedRun, seconds: float, error: str | None) -> Outcome:
    return Outcome(run, seconds, error)


def _one(
    canonical: str, label: str, places: Places, tick: Callable[[str, int], None] | None
) -> tuple[float, str | None]:
    """One run in this process: (seconds, what went wrong)."""
    config = parse_config(json.loads(canonical))
    began, digest = time.perf_counter(), config.digest()
    try:
        _run(config, label, places, tick)
    except Exception as error:  # one failing run must not end the others
        report = {"digest": digest, "label": label, "error": f"{type(error).__name__}: {error}"}
        report["traceback"] = traceback.format_exc()
        path = places.failure(digest)
        files.write(path, json.dumps(report, indent=2) + "\n")
        return time.perf_counter() - began, report["error"].splitlines()[0]
    return time.perf_counter() - began, None


def _run(config: RunConfig, label: str, places: Places, tick: Callable[[str, int], None] | None) -> None:
    from fedlora.runs.execution import execute
    from fedlora.runs.preparation import prepare  # transformers: only the processes that run need it

    began = time.perf_counter()
    folder = places.folder(config.digest())
    prepared = prepare(config, places.data_root)
    for record in execute(prepared, folder, resume=True):
        if tick is not None:
            tick(label, record.round)
        elif multiprocessing.parent_process() is not None and os.getppid() == 1:
            raise SystemExit("the process that asked for this run is gone")  # what is done is stored
    result = summarise(folder, time.perf_counter() - began)
    commit = result["commit"]
    write_result(places.results if commit and commit["clean"] else places.unclean, result)
    places.failure(config.digest()).unlink(missing_ok=True)
