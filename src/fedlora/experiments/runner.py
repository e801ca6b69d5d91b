"""Run what is missing of an experiment: finished runs are skipped, interrupted ones resumed, failures kept apart.

Several processes may run one experiment in one folder: a run is one process's at a time, and who finds it taken does
the others first, then waits for it.
"""

from __future__ import annotations

import gc
import hashlib
import json
import time
import traceback
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from fedlora.runs.preparation import Prepared

from filelock import FileLock, Timeout

from fedlora.core import files
from fedlora.data.demo import PACKAGED
from fedlora.errors import CheckpointError, ConfigError, DataError, FedLoRAError, WorkerDied
from fedlora.experiments.origin import is_clean, made_by, note
from fedlora.experiments.plan import PlannedRun, mains, searches, with_mergers_of
from fedlora.experiments.pool import run_in_processes
from fedlora.experiments.result import Result, content
from fedlora.experiments.spec import Experiment
from fedlora.experiments.store import (
    MERGERS,
    data_of,
    forget_failed,
    gather,
    note_failed,
    read_failed,
    read_results,
    summarise,
)
from fedlora.runs import manifest, resuming
from fedlora.runs.client_data import deal
from fedlora.runs.folder import RunFolder
from fedlora.runs.inputs import contents, named
from fedlora.runs.private_simulation import LEDGER, with_ledger
from fedlora.runs.quiet import quiet_libraries

Tick = Callable[[PlannedRun, int], None]
_OF_THE_MACHINE = (OSError, MemoryError, CheckpointError, WorkerDied, BrokenProcessPool, torch.OutOfMemoryError)


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
        """Where the run is, or will be."""
        return RunFolder(self.work / "runs" / run.digest)

    def classes(self, run: PlannedRun) -> tuple[str, ...]:
        """The classes that the run was begun with; empty where it was not."""
        return resuming.stored_classes(self.folder(run))

    def failure(self, run: PlannedRun) -> Path:
        """What went wrong here, with the traceback."""
        return self.work / "failures" / f"{run.digest}.json"

    def lock(self, run: PlannedRun) -> FileLock:
        """Held by the process that runs it."""
        place = self.work / ".locks"
        place.mkdir(parents=True, exist_ok=True)
        return FileLock(place / run.digest)

    def finished(self, *, unclean: bool = False) -> Mapping[str, Result]:
        """Digest -> result; with `unclean`, also those of a changed checkout, and the mergers that one made."""
        found = read_results(self.results)
        if not unclean:
            return found
        changed = read_results(self.unclean)
        both = {digest: found[digest].with_mergers_of(changed[digest]) for digest in found if digest in changed}
        return {**changed, **found, **both}

    def done(self, run: PlannedRun) -> bool:
        """Whether nothing of the run is left to do."""
        return run.left(self.finished(unclean=True)) is None

    def given_up(self) -> dict[str, str]:
        """Digest -> why, of the runs that failed by themselves, here or where the results were made. What the machine
        failed says nothing of the run."""
        told = {path.stem: json.loads(path.read_bytes()) for path in sorted((self.work / "failures").glob("*.json"))}
        here = {d: said["error"].partition("\n")[0] for d, said in told.items() if not said["by_machine"]}
        return read_failed(self.results) | here

    def keep(self, run: PlannedRun, wall_seconds: float | None) -> None:
        """Gather a finished run. wall_seconds: of its training; None where it was trained before."""
        result = self.summary(run, wall_seconds)
        clean = {label: one for label, one in result.mergers.items() if one.made is None or one.made.clean}
        trained_clean = result.commit is not None and result.commit.clean
        if trained_clean and (clean or not result.mergers):
            gather(self.results, run.experiment, result.model_copy(update={"mergers": clean}))
        if not trained_clean or len(clean) < len(result.mergers):
            gather(self.unclean, run.experiment, result)
        self.failure(run).unlink(missing_ok=True)
        if trained_clean:
            forget_failed(self.results, {run.digest})

    def summary(self, run: PlannedRun, wall_seconds: float | None) -> Result:
        """The run's folder as a result, known as it was planned: wherever its files and its ledger were."""
        if wall_seconds is None:
            known = self.finished(unclean=True).get(run.digest)
            wall_seconds = known.wall_seconds if known is not None else 0.0
        found = summarise(self.folder(run), named(run.config), wall_seconds)
        return found.model_copy(update={"digest": run.digest, "files": dict(run.files)})

    def failed(self, run: PlannedRun, error: Exception) -> None:
        """Note a failed run; beside the results where it failed by itself, in a clean checkout."""
        files.write(self.failure(run), failure_report(run, error))
        commit = manifest.commit_of_code()
        if commit and is_clean(commit) and not by_machine(error) and not isinstance(error, ConfigError | DataError):
            told = {"label": run.label, "error": type(error).__name__, "commit": commit}
            note_failed(self.results, run.digest, told)


@dataclass(frozen=True)
class Outcome:
    """What became of one run. error: one line, or None. unfit: the configuration cannot be run, with any seed.
    by_machine: it is not the configuration that failed, but what it ran on. busy: another process has it."""

    run: PlannedRun
    seconds: float
    error: str | None
    unfit: bool = False
    by_machine: bool = False
    busy: bool = False


def missing(
    experiment: Experiment,
    profile: str,
    places: Places,
    seeds: Sequence[int] | None = None,
    failed: Collection[str] = (),
) -> list[PlannedRun]:
    """The runs that can be started now: of the search, or, where it is done for a cell, of the cell. failed: digests of
    runs of the search that it goes without."""
    done = places.finished(unclean=True)
    wanted = [*searches(experiment, profile), *mains(experiment, profile, done, failed)]
    found: dict[str, PlannedRun] = {}
    for run in wanted:
        if (left := run.left(done)) is not None and (seeds is None or run.searching or run.seed in seeds):
            found[run.digest] = with_mergers_of(left, found.get(run.digest))
    return list(found.values())


def run_all(
    runs: Sequence[PlannedRun],
    places: Places,
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
    for wait in (False, True):
        taken: list[PlannedRun] = []
        for outcome in _once(runs, places, workers, tick, wanted, wait):
            if outcome.busy:
                taken.append(outcome.run)
            else:
                yield outcome
        runs = taken


def _once(
    runs: Sequence[PlannedRun], places: Places, workers: int, tick: Tick | None, wanted: Callable[[PlannedRun], bool],
    wait: bool,
) -> Generator[Outcome, None, None]:  # fmt: skip
    """Each run once. wait: for those that another process has."""
    if workers == 1:
        for run in runs:
            if wanted(run):
                yield _one(places, wait, run, tick)
        return

    def watch(running: Sequence[PlannedRun]) -> None:
        if tick is not None:
            for run in running:
                tick(run, len(places.folder(run).metrics()))

    function = partial(_one, places, wait)
    for run, result in run_in_processes(function, runs, workers, begin=quiet_libraries, wanted=wanted, watch=watch):
        yield result if isinstance(result, Outcome) else _lost(run, places, result)


def failure_report(run: PlannedRun, error: Exception) -> str:
    """What went wrong, with the traceback, as JSON."""
    report = {
        "digest": run.digest,
        "label": run.label,
        "error": f"{type(error).__name__}: {error}",
        "by_machine": by_machine(error),
        "traceback": "".join(traceback.format_exception(error)),
    }
    return json.dumps(report, indent=2) + "\n"


class FilesChanged(DataError, OSError):
    """A file that a run is known by changed while the experiment ran. That says nothing of the run."""


def by_machine(error: BaseException | None) -> bool:
    """Whether the machine failed: a full or broken disk, a damaged folder, one that another process holds, no memory, a
    killed process. Asked of an error and its causes. Another machine, or this one mended, may well run the same."""
    while error is not None:
        if isinstance(error, _OF_THE_MACHINE):
            return True
        if "can't allocate memory" in str(error):  # torch on a CPU, as a RuntimeError
            return True
        error = error.__cause__
    return False


def _check_unchanged(run: PlannedRun) -> None:
    """Raises `FilesChanged` where a file that the run is known by has changed since it was planned."""
    now = contents(run.config) if run.files else {}
    changed = [key for key in now if now[key] != run.files[key]]
    if changed:
        raise FilesChanged(
            f"{', '.join(changed)} changed after the experiment was started, and the result would be told of what "
            f"was there before. Start it again."
        )


def _check_one_kind(run: PlannedRun, manifest: Mapping[str, Any], places: Places) -> None:
    """Raises `FilesChanged` where finished runs had another content of what is known by its name alone: a model of the
    hub, data of a task."""
    config = run.config
    model = None if "model.path" in run.files or config.model.path in PACKAGED else config.model.path
    task = None if config.data.task is None or config.privacy is not None else config.data
    for result in places.finished(unclean=True).values() if model or task else ():
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
    """Keep the failure, where the disk still takes it; it is told in any case."""
    with suppress(OSError):
        places.failed(run, error)


def _lost(run: PlannedRun, places: Places, error: object) -> Outcome:
    """A run that never came back from its process."""
    why = f"{type(error).__name__}: {error}"
    if isinstance(error, BrokenProcessPool):
        why = "its process was killed twice, perhaps for want of memory (try fewer --workers)"
    _note(places, run, WorkerDied(why) if isinstance(error, BrokenProcessPool) else RuntimeError(why))
    return Outcome(run, 0.0, why, by_machine=isinstance(error, BrokenProcessPool))


def _merge(run: PlannedRun, prepared: Prepared, places: Places) -> None:
    """What the run's mergers make of its uploads, beside what others made of them before: into the run's folder."""
    from fedlora.experiments.mergers import merge_all

    folder = places.folder(run)
    before = folder.read_json(MERGERS) if (folder.path / MERGERS).is_file() else {}
    classes = next(iter(prepared.parts.values())).label_names
    made = merge_all(prepared, deal(run.config, places.data_root, classes), folder, run.mergers, validate=run.searching)
    now = made_by(prepared.manifest)
    for label, facts in made.items():
        told = before.get(label, facts)["merger"] == facts["merger"]  # another experiment's label may be of another one
        before[label if told else f"{label} ({_short_digest(facts['merger'])})"] = {**facts, "made": now}
    folder.write_json(MERGERS, before)


def _short_digest(settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]


def _trained(run: PlannedRun, prepared: Prepared, folder: RunFolder) -> bool:
    """Whether the run is whole already: then its numbers stay those of the code that made them. Raises
    `CheckpointError` where it is of other data or another model than there are now."""
    if prepared.config.privacy is not None or not folder.finished():
        return False
    if resuming.changes(folder, prepared.config) and not resuming.changed_keys(folder, prepared.config) <= {*run.files}:
        return False  # files of one's own may have moved
    resuming.check_content(folder, prepared.manifest)
    return folder.whole()


def _one(places: Places, wait: bool, run: PlannedRun, tick: Tick | None = None) -> Outcome:
    """One run in this process, unless another one has it, or finished it meanwhile."""
    try:
        with places.lock(run).acquire(blocking=wait):
            if places.done(run):
                return Outcome(run, 0.0, None)
            if wait and places.failure(run).is_file():
                return Outcome(run, 0.0, "it failed in another process, which says why")
            return _run(places, run, tick)
    except Timeout:
        return Outcome(run, 0.0, None, busy=True)
    finally:
        gc.collect()  # models hold themselves in circles, and a process makes many runs


def _run(places: Places, run: PlannedRun, tick: Tick | None) -> Outcome:
    from fedlora.runs.execution import execute
    from fedlora.runs.preparation import prepare  # transformers: only the processes that run need it

    began, prepared = time.perf_counter(), None
    if tick is not None:
        tick(run, 0)
    try:
        if run.config.privacy is not None and any(key.startswith("data.") for key in run.files):
            raise ConfigError(
                "an experiment's results name data files by their digests, which say something about every client in "
                "them, and [privacy] promises otherwise: use fedlora run, or data that everybody has (data.task)."
            )
        folder = places.folder(run)
        config = with_ledger(run.config, str(folder.path / LEDGER))
        prepared = prepare(config, places.data_root, places.classes(run))
        _check_unchanged(run)
        _check_one_kind(run, prepared.manifest, places)
        trained = _trained(run, prepared, folder)
        if not trained:
            note(folder, prepared.manifest)
            for record in execute(prepared, folder, resume=True):
                if tick is not None:
                    tick(run, record.round)
        if run.mergers:
            _merge(run, prepared, places)
        places.keep(run, None if trained else time.perf_counter() - began)
    except Exception as error:  # one failing run must not end the others
        _note(places, run, error)
        unfit = prepared is None and isinstance(error, FedLoRAError) and not isinstance(error, DataError)
        kind = "" if isinstance(error, FedLoRAError) else f"{type(error).__name__}: "
        why = f"{kind}{error}".splitlines()[0]
        return Outcome(run, time.perf_counter() - began, why, unfit, by_machine(error))
    return Outcome(run, time.perf_counter() - began, None)
