"""`fedlora experiment run | retry | status`: run what is missing, and count the runs."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import typer

from fedlora.cli.batches import Cluster, run_stages, worker_count
from fedlora.cli.experiment_costs import show_plan
from fedlora.cli.experiment_project import Project
from fedlora.cli.grid_parts import parse_only, parse_seeds, parse_shard
from fedlora.cli.screen import NOT_WHOLE, Table, complain, console, notes, print_json
from fedlora.errors import ConfigError, counted, said_by
from fedlora.experiments.checks import problems
from fedlora.experiments.costs import Workloads
from fedlora.experiments.grid import Grid
from fedlora.experiments.lost import dead_ends, lost_lines, lost_of
from fedlora.experiments.places import Places
from fedlora.experiments.plan import PlannedRun
from fedlora.experiments.runnable import check_number, other_files
from fedlora.experiments.spec import Experiment
from fedlora.experiments.store import forget_failed
from fedlora.runs.quiet import quiet_libraries


def run_missing(
    project: Project, names: Sequence[str], profile: str, seeds: str | None, workers: str, plan: bool, measure: bool,
    price: float | None, *, only: str | None = None, shard: str | None = None, cluster: Cluster | None = None,
) -> None:  # fmt: skip
    """Run what is missing; `fedlora experiment run --help` explains each argument."""
    places = project.places
    grids = [places.grid(one, profile) for one in chosen(project, names, profile, seeds, only)]
    if (measure or price is not None) and not plan:
        raise ConfigError("--measure and --price are for --plan, which runs nothing: give it too, or leave them out.")
    if plan and shard is not None:
        raise ConfigError("--plan counts the runs of all shards; leave --shard out.")
    quiet_libraries()
    mine = (lambda run: True) if shard is None else parse_shard(shard)
    count = Workloads(places.data_root)
    wrong: list[str] = []
    for k, grid in enumerate(grids):
        grids[k], faults = grid.without_faults()
        wrong += [*faults, *said_by(partial(check_number, grids[k]))]
    todo = [run for grid in grids for run in grid.missing]
    later = [run for grid in grids for run in grid.waiting if run.digest not in grid.results]
    at_once = worker_count(workers, todo)
    here = at_once if cluster is None else None
    wrong += problems([run for run in [*todo, *later] if mine(run)], places, here, count)
    if plan:
        show_plan(grids, count, wrong, measure=measure, price=price)
        return
    _tell_wrong(wrong)
    places.check_writable()
    notes.warn(*other_files(todo, grids[0].results))
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a batch system's end is like Ctrl-C
    try:
        for grid in grids:
            run_stages(
                grid, places, workers, again=lambda grid, _: places.again(grid), cluster=cluster,
                wanted=lambda run: mine(run) and not places.failure(run).exists(),
            )  # fmt: skip
    finally:
        signal.signal(signal.SIGTERM, before)
    broken = 0
    for grid in map(places.again, grids):
        if shard is not None:
            broken += _tell_shard(grid, places, shard, mine)
            continue
        notes.warn(*lost_lines(grid))
        broken += sum(len(one.seeds) for one in lost_of(grid) if one.why) + len(dead_ends(grid))
    if broken:
        said = f"{counted(broken, 'run')} failed; see {places.work / 'failures'}. Mend the cause, then: fedlora "
        complain(f"{said}experiment retry --work {places.work}, and run again.")
        raise typer.Exit(NOT_WHOLE)


def _tell_shard(grid: Grid, places: Places, shard: str, mine: Callable[[PlannedRun], bool]) -> int:
    """Print what a shard left, and what others have to do; returns how many runs of the shard failed."""
    left, waiting_for = grid.missing, len(grid.waiting)
    failed = [run for run in [*left, *grid.searches] if mine(run) and places.failure(run).exists()]
    others = sum(not mine(run) for run in left)
    notes.warn(*(f"{run.label} failed" for run in failed))
    notes.print(
        f"{grid.experiment.name}, shard {shard}: done; {counted(others, 'run')} of other shards to do"
        + (
            f"; {counted(waiting_for, 'run')} wait for the search, which decides their shards: when all shards have "
            f"ended, call each one's command again"
            if waiting_for
            else ""
        )
    )
    return len({run.digest for run in failed})


def chosen(
    project: Project, names: Sequence[str], profile: str, seeds: str | None, only: str | None
) -> list[Experiment]:
    """The experiments with these seeds and labels alone. Raises `ConfigError`."""
    wanted = None if seeds is None else parse_seeds(seeds, "--seeds")
    loaded = [_of_seeds(project.named(name), profile, wanted) for name in names]
    return loaded if only is None else [one.narrowed(profile, parse_only(only, one)) for one in loaded]


def _tell_wrong(found: Sequence[str]) -> None:
    """Raises `ConfigError` if anything is wrong; more than one thing stands in lines before it."""
    if len(found) == 1:
        raise ConfigError(found[0])
    notes.warn(*found)
    if found:
        raise ConfigError(f"{len(found)} things are wrong, each in a line above. No run was started.")


def _of_seeds(experiment: Experiment, profile: str, only: list[int] | None) -> Experiment:
    """The experiment with the requested seeds alone. Raises `ConfigError` for a seed that
    the profile lacks."""
    known = experiment.profile(profile).seeds
    if unknown := sorted({*(only or [])} - {*known}):
        raise ConfigError(
            f"--seeds {unknown[0]} is not a seed of {experiment.name}, profile {profile}: it has "
            f"{', '.join(map(str, known))}."
        )
    return experiment if only is None else experiment.with_seeds(profile, only)


def forget_failures(results: Path, work: Path) -> None:
    """Forget the failures on this machine and those stored with the results."""
    found = sorted((work / "failures").glob("*.json"))
    forget_failed(results, {path.stem for path in found})
    for path in found:
        path.unlink()
    notes.print(f"{counted(len(found), 'failure')} forgotten")


def show_status(
    project: Project, names: Sequence[str], profile: str, as_json: bool, *, only: str | None = None
) -> None:
    """Show a row for each experiment."""
    places = project.places
    shown = Table("experiment", "search", "runs", "failed", "to do", title=f"Experiments, profile {profile}")
    found: dict[str, Any] = {}
    for experiment in chosen(project, names, profile, None, only):
        grid = places.grid(experiment, profile)
        failed = sum(places.failure(run).exists() for run in grid.missing)
        notes.warn(*other_files(grid.missing, grid.results))
        searched = [sum(run.digest in grid.results for run in grid.searches), len(grid.searches)]
        runs, left = [len(grid.used), grid.count], grid.count - len(grid.used)
        found[experiment.name] = {"search": searched, "runs": runs, "failed": failed, "to_do": left}
        shown.add_row(experiment.name, *(f"{a} of {b}" for a, b in (searched, runs)), str(failed), str(left))
    print_json(found) if as_json else console.print(shown)
