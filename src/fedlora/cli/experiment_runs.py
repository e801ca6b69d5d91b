"""The work of `fedlora experiment` and `fedlora compare`: run what is missing, count it, show it.

A comparison is an experiment of one axis. OUT/runs/DIGEST are its run folders, OUT/results.jsonl its results.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import typer

from fedlora.cli.batches import watched
from fedlora.cli.experiment import Machines, Place
from fedlora.cli.formats import Format, show
from fedlora.cli.screen import NOT_WHOLE, Table, complain, console, notes, plotted, print_json
from fedlora.cli.typed import parse_only, parse_seeds
from fedlora.errors import ConfigError, counted
from fedlora.experiments import cost
from fedlora.experiments.clusters import Asked, forget, ray_tasks, slurm
from fedlora.experiments.drive import Start, Store, drive, progress_of
from fedlora.experiments.grid import Grid, Stage
from fedlora.experiments.here import here, worker_count
from fedlora.experiments.paper import paper_of, paper_tables
from fedlora.experiments.spec import PROFILE, Experiment, load_experiment, names_in
from fedlora.experiments.tables import Table as Shown
from fedlora.experiments.tables import tables_of, warnings
from fedlora.experiments.tune import Progress
from fedlora.experiments.work import Work
from fedlora.runs.drawing import check_picture

EXPERIMENTS = Path("experiments")


def grids(names: Sequence[str], profile: str, only: str | None = None, seeds: str | None = None) -> list[Grid]:
    """The experiments, NAME.toml in the folder or a path, with these seeds and labels alone. Raises `ConfigError`."""
    wanted = None if seeds is None else parse_seeds(seeds, "--seeds")
    found = []
    for name in names:
        path = Path(name) if name.endswith(".toml") else EXPERIMENTS / f"{name}.toml"
        if not path.is_file():
            known = ", ".join(names_in(EXPERIMENTS)) or "none"
            raise ConfigError(f"there is no experiment {path}; in {EXPERIMENTS} there are: {known}.")
        one = load_experiment(path)
        found.append(Grid(one, profile, {} if only is None else parse_only(only, one.axes), wanted))
    return found


def place_of(grid: Grid, results: Path) -> Path:
    """The experiment's file of results."""
    return results / f"{grid.experiment.name}.jsonl"


def run_missing(
    chosen: Sequence[Grid], results: Path, work: Path, data_root: Path | None, place: Place, *, again: bool,
    stages: Sequence[Stage],
) -> None:  # fmt: skip
    """Run what is missing. again: first forget what failed."""
    _check(chosen)
    failed = 0
    for grid in chosen:
        store = Store(place_of(grid, results), Work(work, data_root))
        start = starter(place, store.work, grid)
        with store.held(), watched(grid.experiment.name, store.work) as watch:
            if again:
                store.forget(grid)
                if place.backend == Machines.slurm:
                    forget(store.work, grid.name)
            ended = drive(grid, store, start, watch, stages)
        progress = store.progress(grid)
        failed += sum(digest not in progress.lines for digest in ended)
        failed += sum("failed" in line for _, line in progress.used)
        notes.warn(*progress.notes() if "run" in stages else progress.chosen())
    if failed:
        complain(f"{counted(failed, 'run')} failed; see {work / 'failures'}. Mend the cause, and call this again.")
        raise typer.Exit(NOT_WHOLE)


def starter(place: Place, work: Work, grid: Grid) -> Start:
    """What makes the runs. Raises `ConfigError` for Slurm without a time limit."""
    if place.backend == Machines.here:
        return lambda runs: here(runs, work, worker_count(place.workers, runs))
    if place.backend == Machines.ray:
        return partial(ray_tasks, work=work, gpus=place.gpus)
    if place.time is None:
        raise ConfigError(
            "--backend slurm needs --time, the limit of a run: 04:00:00. A run that meets it is queued again."
        )
    asked = Asked(place.time, place.gpus or 0, place.options)
    return partial(slurm, work=work, name=grid.name, asked=asked)


def _check(chosen: Sequence[Grid]) -> None:
    """Raises `ConfigError` with all that is wrong, before anything is started: each configuration is tried on a toy."""
    found: dict[str, list[str]] = {}
    for grid in chosen:
        for cell, why in grid.faults().items():
            found.setdefault(why, []).append(", ".join(cell))
    lines = [f"{cells[0]}{f' and {len(cells) - 1} more' if cells[1:] else ''}: {why}" for why, cells in found.items()]
    if len(lines) > 1:
        notes.warn(*lines)
        raise ConfigError(f"{len(lines)} things are wrong, each in a line above. No run was started.")
    if lines:
        raise ConfigError(lines[0])


def show_status(chosen: Sequence[Grid], results: Path, work: Path, as_json: bool) -> None:
    """Show a row for each experiment, and a line for each failure."""
    shown = Table("experiment", "profile", "search", "runs", "failed", "to do")
    found: dict[str, Any] = {}
    for grid in chosen:
        store = Store(place_of(grid, results), Work(work))
        progress = store.progress(grid)
        searched = [sum(run.digest in progress.lines for run in grid.searches), len(grid.searches)]
        failures = [(run, why) for run in [*grid.searches, *progress.runs] if (why := store.work.why(run)) is not None]
        runs, left = [len(progress.used), progress.count], progress.count - len(progress.used)
        found[grid.experiment.name] = {"search": searched, "runs": runs, "failed": len(failures), "to_do": left}
        counts = (f"{done} of {of}" for done, of in (searched, runs))
        shown.add_row(grid.experiment.name, grid.profile, *counts, str(len(failures)), str(left))
        notes.warn(*(f"{run.label} failed: {why}" for run, why in failures))
    print_json(found) if as_json else console.print(shown)


def show_plan(
    chosen: Sequence[Grid], results: Path, data_root: Path | None, *, measure: bool, price: float | None
) -> None:
    """Show what would run, and what it costs; nothing is kept."""
    _check(chosen)
    rows = []
    for grid in chosen:
        progress = progress_of(grid, place_of(grid, results))
        todo = cost.to_do(progress) if measure else []
        trials = cost.tried(todo, data_root, lambda run: notes.print(f"two trial rounds of {run.label}"))
        rows.append(cost.row_of(progress, trials, price))
        notes.warn(*dict.fromkeys(f"a trial failed: {why}" for why in trials.values() if isinstance(why, str)))
    tried = any("hours" in row for row in rows)
    caption = "What would run." + (" Hours of one process, from two trial rounds here." if tried else "")
    show([Shown(pd.DataFrame(rows), 1, [caption])], [], Format.table)


def show_table(grid: Grid, results: Path, metric: str | None, margin: float | None, form: Format) -> None:
    """Show the paper's table, scores, differences and costs, with the notes that a reader needs below."""
    progress = progress_of(grid, place_of(grid, results))
    paper = paper_of(grid.experiment)
    printed = [] if paper is None or form is Format.csv else paper_tables(progress, paper, metric)
    _tell(progress, [*printed, *tables_of(progress, metric, margin)], progress.notes(), form)


def _tell(progress: Progress, tables: Sequence[Shown], remarks: Sequence[str], form: Format) -> None:
    show(tables, [*warnings(progress), *remarks], form)
    if not progress.whole:
        raise typer.Exit(NOT_WHOLE)


def draw(grid: Grid, results: Path, out: Path | None) -> None:
    """Draw the finished runs."""
    progress = progress_of(grid, place_of(grid, results))
    plotted(lambda _: _pictures(progress, out or results / "plots" / f"{grid.name}.png"))
    if not progress.used:
        raise typer.Exit(NOT_WHOLE)


def _pictures(progress: Progress, target: Path) -> list[Path]:
    from fedlora.experiments.pictures import drawn

    if not (made := drawn(progress, target)):
        notes.warn(
            "no picture: it takes runs of several evaluated rounds, or two seeds whose differences are not all equal"
        )
    return made


def run_comparison(
    experiment: Experiment, folder: Path, data_root: Path | None, workers: str, resume: bool, form: Format
) -> None:
    """Run what is missing of a comparison, the methods that their configuration lets run; show and draw it."""
    faults = Grid(experiment, PROFILE).faults()
    refused = [f"{label} not run: {why}" for (label,), why in faults.items()]
    able = [label for label in experiment.axes[experiment.rows] if (label,) not in faults]
    if not able:
        raise typer.Exit(complain(f"no method could run: {'; '.join(refused)}"))
    notes.warn(*refused)  # before the others take hours
    grid = Grid(experiment.model_copy(update={"reference": able[0]}), PROFILE, {experiment.rows: able})
    store, picture = Store(folder / "results.jsonl", Work(folder, data_root)), folder / "comparison.png"
    check_picture(picture)
    if not resume and (store.results.exists() or (folder / "runs").exists()):
        raise ConfigError(f"{folder} already holds a run; add --resume to continue it, or choose another --out.")
    one_seed = ["One seed: no interval and no verdict. Add --seeds 0:8."] if len(grid.seeds) == 1 else []
    notes.warn(*one_seed)
    with store.held(), watched(experiment.name, store.work) as watch:
        store.forget(grid)
        failed = drive(grid, store, lambda runs: here(runs, store.work, worker_count(workers, runs)), watch)
    progress = store.progress(grid)
    if not any("failed" not in line for _, line in progress.used):
        raise typer.Exit(complain(f"no method could run: {'; '.join([*refused, *failed.values()])}"))
    plotted(lambda _: _pictures(progress, picture))
    _tell(progress, tables_of(progress), [*refused, *progress.notes(), *one_seed], form)
