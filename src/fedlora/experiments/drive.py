"""The driver: the search, then the runs that count, each gathered into the results by this process alone.

A driver that dies is called again: it finds what has ended meanwhile in the run folders, and starts what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from fedlora.errors import ConfigError
from fedlora.experiments import results
from fedlora.experiments.grid import Grid, Planned, Stage
from fedlora.experiments.here import Ended
from fedlora.experiments.scores import Line
from fedlora.experiments.tune import Progress
from fedlora.experiments.work import Work

Start = Callable[[Sequence[Planned]], Ended]
Watch = Callable[[Sequence[Planned], tuple[Planned, str | None] | None], None]


def progress_of(grid: Grid, place: Path) -> Progress:
    """What there is of an experiment in its file of results, and under other names in the same folder, because
    experiments may share runs."""
    found: dict[str, Line] = {}
    for path in [*sorted(place.parent.glob("*.jsonl")), place]:
        found |= results.read(path)
    return Progress(grid, found)


@dataclass(frozen=True)
class Store:
    """Where an experiment is kept. results: its file of lines. work: run folders and failures."""

    results: Path
    work: Work

    def progress(self, grid: Grid) -> Progress:
        """What there is of the experiment."""
        return progress_of(grid, self.results)

    def gathered(self, grid: Grid, stage: Stage) -> Progress:
        """`progress`, with a line for each run of the stage that has ended and has none."""
        progress = self.progress(grid)
        new = {run.digest: line for run in progress.missing(stage) if (line := self.work.line(run)) is not None}
        for line in new.values():
            results.append(self.results, line)
        return Progress(grid, {**progress.lines, **new}) if new else progress

    def forget(self, grid: Grid) -> None:
        """Forget the failures of its runs, so that they are tried again."""
        for run in [*grid.searches, *self.progress(grid).runs]:
            self.work.failure(run).unlink(missing_ok=True)
        lines = results.read(self.results).values()
        results.rewrite(self.results, [line for line in lines if "failed" not in line])

    @contextmanager
    def held(self) -> Iterator[None]:
        """Be the only driver; at the end the results are sorted. Raises `ConfigError` if another one is at work."""
        for place in (self.results.parent, self.work.folder):
            place.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self.work.folder / f".{self.results.stem}.lock", timeout=0):
                try:
                    yield
                finally:
                    results.rewrite(self.results, results.read(self.results).values())
        except Timeout as error:
            raise ConfigError(
                f"another process drives {self.results.stem} in {self.work.folder}: wait for it, or end it. One driver "
                f"starts all runs; it takes --workers, --backend slurm or --backend ray."
            ) from error


def drive(
    grid: Grid, store: Store, start: Start, watch: Watch, stages: Sequence[Stage] = ("search", "run")
) -> dict[str, str]:
    """Run what is missing, each stage's runs at most once. Returns digest -> why it failed.

    Args:
        start: makes runs (`here`, `clusters`). watch: called with a stage's runs before it starts, after each
            look, and with each run that has ended.
    """
    failed: dict[str, str] = {}
    for stage in stages:
        progress = store.gathered(grid, stage)
        todo = [run for run in progress.missing(stage) if run.digest not in failed]
        if not todo:
            continue
        watch(todo, None)
        with closing(start(todo)) as ended:
            for one in ended:
                if one is not None:
                    run, why = one
                    if (line := store.work.line(run)) is not None:
                        results.append(store.results, line)
                    if why is not None:
                        failed[run.digest] = why
                watch(todo, one)
    return failed
