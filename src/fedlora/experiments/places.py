"""Where an experiment's runs, results and failures are, and which failures say nothing about a run."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

import torch

from fedlora.core import files
from fedlora.errors import CheckpointError, ConfigError, DataError, WorkerDied
from fedlora.experiments.grid import Grid
from fedlora.experiments.plan import PlannedRun
from fedlora.experiments.result import Result
from fedlora.experiments.spec import Experiment
from fedlora.experiments.store import forget_failed, gather, note_failed, read_failed, read_results, summarise
from fedlora.runs import manifest, resuming
from fedlora.runs.folder import RunFolder
from fedlora.runs.inputs import named

_OF_THE_MACHINE = (OSError, MemoryError, CheckpointError, WorkerDied, BrokenProcessPool, torch.OutOfMemoryError)


@dataclass(frozen=True)
class Places:
    """The folders. results: finished runs. work: run folders and failures."""

    results: Path
    work: Path
    data_root: Path | None

    def folder(self, run: PlannedRun) -> RunFolder:
        """The run's folder, which may not exist yet."""
        return RunFolder(self.work / "runs" / run.digest)

    def classes(self, run: PlannedRun) -> tuple[str, ...]:
        """The classes with which the run began; empty if it has not begun."""
        return resuming.stored_classes(self.folder(run))

    def failure(self, run: PlannedRun) -> Path:
        """The file with the failure here, and its traceback."""
        return self.work / "failures" / f"{run.digest}.json"

    def check_writable(self) -> None:
        """Raises `ConfigError` if results or run folders cannot be written."""
        for place, option in ((self.results, "--results"), (self.work, "--work")):
            try:
                place.mkdir(parents=True, exist_ok=True)
                with TemporaryFile(dir=place):
                    pass
            except OSError as error:
                raise ConfigError(f"{option} {place} cannot be written: {error.strerror}.") from error

    @property
    def claims(self) -> Path:
        """The folder where processes say which runs they have (`leases.Claims`)."""
        return self.work / ".claims"

    def finished(self) -> Mapping[str, Result]:
        """Digest -> result."""
        return read_results(self.results)

    def done(self, run: PlannedRun) -> bool:
        """Whether nothing of the run is left to do."""
        return run.digest in self.finished()

    def given_up(self) -> dict[str, str]:
        """Digest -> reason, for runs that failed on their own, here or where the results were made. A failure of the
        machine says nothing about the run."""
        return read_failed(self.results) | self._failed_here(by_machine=False)

    def _failed_here(self, *, by_machine: bool) -> dict[str, str]:
        told = [json.loads(path.read_bytes()) for path in sorted((self.work / "failures").glob("*.json"))]
        return {one["digest"]: one["error"].partition("\n")[0] for one in told if one["by_machine"] == by_machine}

    def grid(self, experiment: Experiment, profile: str) -> Grid:
        """The experiment with what is finished and what failed."""
        return Grid(experiment, profile, self.finished(), self.given_up(), self._failed_here(by_machine=True))

    def again(self, grid: Grid) -> Grid:
        """The grid with what is finished by now, and what failed."""
        return self.grid(grid.experiment, grid.profile)

    def keep(self, run: PlannedRun, wall_seconds: float | None) -> None:
        """Store a finished run's result. wall_seconds: of its training; None if it was trained before."""
        gather(self.results, run.experiment, self.summary(run, wall_seconds))
        self.failure(run).unlink(missing_ok=True)
        forget_failed(self.results, {run.digest})

    def summary(self, run: PlannedRun, wall_seconds: float | None) -> Result:
        """The run's folder as a result, under the planned digest, wherever its files and its ledger were."""
        if wall_seconds is None:
            known = self.finished().get(run.digest)
            wall_seconds = known.wall_seconds if known is not None else 0.0
        found = summarise(self.folder(run), named(run.config), wall_seconds)
        return found.model_copy(update={"digest": run.digest, "files": dict(run.files)})

    def failed(self, run: PlannedRun, error: Exception) -> None:
        """Record a failed run; with the results too, if it failed on its own."""
        files.write(self.failure(run), failure_report(run, error))
        if not by_machine(error) and not isinstance(error, ConfigError | DataError):
            told = {"label": run.label, "error": type(error).__name__, "commit": manifest.commit_of_code()}
            note_failed(self.results, run.digest, told)


def failure_report(run: PlannedRun, error: Exception) -> str:
    """The failure and its traceback, as JSON."""
    report = {
        "digest": run.digest,
        "label": run.label,
        "error": f"{type(error).__name__}: {error}",
        "by_machine": by_machine(error),
        "traceback": "".join(traceback.format_exception(error)),
    }
    return json.dumps(report, indent=2) + "\n"


def by_machine(error: BaseException | None) -> bool:
    """Whether the machine failed: a full or broken disk, a damaged folder, one that another process holds, no memory, a
    killed process. Checks an error and its causes. Another machine, or this one repaired, may well do the same run."""
    while error is not None:
        if isinstance(error, _OF_THE_MACHINE):
            return True
        if "can't allocate memory" in str(error):  # torch on a CPU raises RuntimeError
            return True
        error = error.__cause__
    return False
