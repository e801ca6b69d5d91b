"""`fedlora experiment run | tune | status`: run what is missing, count the runs, and say what they will cost."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import typer

from fedlora.cli.batches import watched
from fedlora.cli.experiment import Machines, Place, Project
from fedlora.cli.formats import Format, show
from fedlora.cli.grid_parts import parse_only, parse_seeds
from fedlora.cli.screen import NOT_WHOLE, Table, complain, console, notes, print_json
from fedlora.errors import ConfigError, counted
from fedlora.experiments.drive import Start, Store, drive
from fedlora.experiments.grid import Grid, Stage
from fedlora.experiments.here import here, worker_count
from fedlora.experiments.ray_tasks import ray_tasks
from fedlora.experiments.slurm import Asked, forget, slurm
from fedlora.experiments.spec import Experiment, load_experiment, names_in
from fedlora.experiments.work import Work


def named(project: Project, name: str) -> Experiment:
    """NAME.toml in the folder, or a path. Raises `ConfigError` if there is none; the message lists the names."""
    path = Path(name) if name.endswith(".toml") else project.experiments / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(names_in(project.experiments)) or "none"
        raise ConfigError(f"there is no experiment {path}; in {project.experiments} there are: {known}.")
    return load_experiment(path)


def kept(project: Project, experiment: Experiment) -> Store:
    """Where the experiment's runs and results are."""
    return Store(project.results / f"{experiment.name}.jsonl", Work(project.work, project.data_root))


def grids(project: Project, names: Sequence[str], profile: str, seeds: str | None, only: str | None) -> list[Grid]:
    """The experiments with these seeds and labels alone. Raises `ConfigError`."""
    wanted = None if seeds is None else parse_seeds(seeds, "--seeds")
    loaded = [named(project, name) for name in names]
    return [Grid(one, profile, {} if only is None else parse_only(only, one.axes), wanted) for one in loaded]


def run_missing(
    project: Project,
    names: Sequence[str],
    profile: str,
    seeds: str | None,
    only: str | None,
    again: bool,
    place: Place,
    stages: Sequence[Stage] = ("search", "run"),
) -> None:
    """Run what is missing; `fedlora experiment run --help` explains each argument."""
    chosen = grids(project, names, profile, seeds, only)
    _check(chosen)
    failed = 0
    for grid in chosen:
        store = kept(project, grid.experiment)
        start = starter(place, store.work, grid)
        with store.held(), watched(grid.experiment.name, store.work) as watch:
            if again:
                store.forget(grid)
                forget(store.work, grid.name, [*grid.searches, *store.progress(grid).runs])
            ended = drive(grid, store, start, watch, stages)
        progress = store.progress(grid)
        failed += sum(digest not in progress.lines for digest in ended)
        if not place.no_wait:
            failed += sum("failed" in line for _, line in progress.used)
            notes.warn(*progress.notes() if stages[-1] == "run" else _choices(grid, store))
    if failed:
        complain(
            f"{counted(failed, 'run')} failed; see {project.work / 'failures'}. Mend the cause, and call this again."
        )
        raise typer.Exit(NOT_WHOLE)


def starter(place: Place, work: Work, grid: Grid) -> Start:
    """What makes the runs. Raises `ConfigError` for options of another place."""
    of = {"address": "ray", "gpus": "slurm or ray", "memory": "slurm or ray", "time": "slurm", "options": "slurm",
          "no_wait": "slurm"}  # fmt: skip
    for name, where in of.items():
        if getattr(place, name) and place.backend not in where.split(" or "):
            raise ConfigError(f"--{name.rstrip('s').replace('_', '-')} is for --backend {where}; leave it out.")
    if place.backend == Machines.here:
        return lambda runs: here(runs, work, worker_count(place.workers, runs))
    if place.workers != "1":
        raise ConfigError("--workers are processes of this machine; a cluster runs as many as it has room for.")
    if place.backend == Machines.ray:
        return partial(ray_tasks, work=work, address=place.address, gpus=place.gpus, memory=place.memory)
    if place.time is None:
        raise ConfigError(
            "--backend slurm needs --time, the limit of a run: 04:00:00. A run that meets it is queued again."
        )
    asked = Asked(place.time, place.gpus or 0, place.memory, place.options)
    follow = [sys.executable, "-m", "fedlora", *sys.argv[1:]] if place.no_wait else []
    return partial(slurm, work=work, name=grid.name, asked=asked, follow=[word for word in follow if word != "--force"])


def _check(chosen: Sequence[Grid]) -> None:
    """Raises `ConfigError` with all that is wrong, before anything is started: each configuration is tried on a toy."""
    found: dict[str, list[str]] = {}
    for grid in chosen:
        grid.check_number()
        for cell, why in grid.faults().items():
            found.setdefault(why, []).append(", ".join(cell))
    lines = [f"{cells[0]}{f' and {len(cells) - 1} more' if cells[1:] else ''}: {why}" for why, cells in found.items()]
    if len(lines) > 1:
        notes.warn(*lines)
        raise ConfigError(f"{len(lines)} things are wrong, each in a line above. No run was started.")
    if lines:
        raise ConfigError(lines[0])


def _choices(grid: Grid, store: Store) -> list[str]:
    """What the search chose."""
    tune, made = grid.experiment.tune, store.progress(grid).choices
    key = "" if tune is None else tune.key
    return [f"{', '.join(over) or 'all'}: {key} = {one.value}" for over, one in made.items()] or ["No choice yet."]


def show_status(project: Project, names: Sequence[str], profile: str, only: str | None, as_json: bool) -> None:
    """Show a row for each experiment, and a line for each failure."""
    shown = Table("experiment", "search", "runs", "failed", "to do", title=f"Experiments, profile {profile}")
    found: dict[str, Any] = {}
    for grid in grids(project, names, profile, None, only):
        store = kept(project, grid.experiment)
        progress = store.progress(grid)
        searched = [sum(run.digest in progress.lines for run in grid.searches), len(grid.searches)]
        failures = [(run, why) for run in [*grid.searches, *progress.runs] if (why := store.work.why(run)) is not None]
        left = progress.count - len(progress.used)
        found[grid.experiment.name] = {
            "search": searched, "runs": [len(progress.used), progress.count], "failed": len(failures), "to_do": left
        }  # fmt: skip
        counts = (f"{a} of {b}" for a, b in (searched, (len(progress.used), progress.count)))
        shown.add_row(grid.experiment.name, *counts, str(len(failures)), str(left))
        notes.warn(*(f"{run.label} failed: {why}" for run, why in failures))
    print_json(found) if as_json else console.print(shown)


def show_plan(
    project: Project, names: Sequence[str], profile: str, seeds: str | None, only: str | None, measure: bool,
    price: float | None,
) -> None:  # fmt: skip
    """Show what would run, and what it costs; nothing is kept."""
    import pandas as pd

    from fedlora.experiments import cost
    from fedlora.experiments.tables import Table as Shown

    if price is not None and not measure:
        raise ConfigError("--price is of the hours that --measure finds: give it too.")
    chosen = grids(project, names, profile, seeds, only)
    _check(chosen)
    rows = []
    for grid in chosen:
        progress = kept(project, grid.experiment).progress(grid)
        todo = cost.to_do(progress) if measure else []
        trials = cost.tried(todo, project.data_root, lambda run: notes.print(f"two trial rounds of {run.label}"))
        rows.append(cost.row_of(grid, progress, trials, price))
        notes.warn(*dict.fromkeys(f"a trial failed: {why}" for why in trials.values() if isinstance(why, str)))
    caption = "What would run." + (" Hours of one process, from two trial rounds here." if measure else "")
    show([Shown(pd.DataFrame(rows), 1, [caption])], [], Format.table)
