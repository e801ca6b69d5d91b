"""`fedlora experiment run | retry | status`: what is missing is run, and how much there is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from fedlora.cli.batches import run_stages
from fedlora.cli.experiment_costs import show_plan
from fedlora.cli.experiment_project import Project, search_lines, tell
from fedlora.cli.screen import Table, complain, console, notes, print_json
from fedlora.cli.seeds import parse_seeds
from fedlora.errors import ConfigError, counted
from fedlora.experiments.plan import PlannedRun, chosen_value, mains, searches
from fedlora.experiments.runnable import check_number, check_runnable, missing_files, other_files
from fedlora.experiments.runner import Outcome, missing
from fedlora.experiments.spec import Experiment
from fedlora.experiments.store import forget_failed


def run_missing(
    project: Project, names: Sequence[str], profile: str, seeds: str | None, workers: str, plan: bool,
    rate: float | None, budget: float | None,
) -> None:  # fmt: skip
    """Said of each argument: `fedlora experiment run --help`."""
    places = project.places
    loaded = [project.named(name) for name in names]
    only = None if seeds is None else parse_seeds(seeds, "--seeds")
    _check(project, loaded, profile, only)
    if rate is not None and not plan:
        raise ConfigError("--plan computes hours from --rate: give both, or leave it out.")
    if plan:
        show_plan(loaded, profile, places, only, rate)
        return
    for experiment in loaded:
        todo = missing(experiment, profile, places, only, places.given_up())
        if gone := missing_files(todo):
            raise ConfigError(f"experiment {experiment.name}: {' '.join(gone)}")
        tell(other_files(todo, places.finished(unclean=True)))
    until = time.monotonic() + budget * 3600 if budget is not None else None

    def wanted(run: PlannedRun) -> bool:
        return (until is None or time.monotonic() < until) and not places.failure(run).exists()

    failed: list[Outcome] = []
    for experiment in loaded:
        failed += run_stages(
            experiment, profile, places, workers, only=only, given_up=lambda _: places.given_up(), wanted=wanted
        )
    gone_without = _gone_without(project, loaded, profile)
    project.tell_left_out([(experiment, profile) for experiment in loaded])
    if until is not None and time.monotonic() > until:
        notes.print("the budget is used up; run again to continue", style="yellow")
    failed = [outcome for outcome in failed if outcome.run.digest not in gone_without]
    for outcome in failed:
        notes.print(f"failed: {outcome.run.label}: {outcome.error}", style="red", markup=False, soft_wrap=True)
    if failed:
        lost = f"{counted(len(failed), 'run')} failed; see {places.work / 'failures'}. Mend the cause, then: fedlora "
        raise typer.Exit(complain(f"{lost}experiment retry --work {places.work}, and run again."))


def _check(project: Project, loaded: Sequence[Experiment], profile: str, only: list[int] | None) -> None:
    """Raises `ConfigError` for what can be known before anything runs."""
    for experiment in loaded:
        known = experiment.profile(profile).seeds
        if unknown := sorted({*(only or [])} - {*known}):
            raise ConfigError(
                f"--seeds {unknown[0]} is no seed of {experiment.name}, profile {profile}: it has "
                f"{', '.join(map(str, known))}."
            )
        check_number(experiment, profile, experiment.compared(profile))
        check_runnable(missing(experiment, profile, project.places, only, project.given_up))


def _gone_without(project: Project, loaded: Sequence[Experiment], profile: str) -> set[str]:
    """The failed runs of searches that chose all the same; what the searches did not choose is told."""
    done, given_up = project.places.finished(unclean=True), project.given_up
    found = set()
    for experiment in loaded:
        tell(search_lines(experiment, profile, done, given_up))
        for run in searches(experiment, profile):
            if run.digest in given_up and chosen_value(experiment, profile, run.cell, done, given_up) is not None:
                found.add(run.digest)
    return found


def forget_failures(results: Path, work: Path) -> None:
    """Of this machine and beside the results."""
    found = sorted((work / "failures").glob("*.json"))
    forget_failed(results, {path.stem for path in found})
    for path in found:
        path.unlink()
    notes.print(f"{len(found)} failures forgotten")


def show_status(project: Project, names: Sequence[str], profile: str, as_json: bool) -> None:
    """A row for each experiment."""
    places = project.places
    done, given_up = places.finished(unclean=True), places.given_up()
    shown = Table("experiment", "search", "runs", "failed", "to do", title=f"Experiments, profile {profile}")
    found: dict[str, Any] = {}
    for name in names:
        experiment = project.named(name)
        search = searches(experiment, profile)
        cells = sum(1 for _ in experiment.cells(profile)) * len(experiment.profile(profile).seeds)
        finished = sum(run.result(done) is not None for run in mains(experiment, profile, done, given_up))
        left = missing(experiment, profile, places, None, given_up)
        failed = sum(places.failure(run).exists() for run in left)
        tell(other_files(left, done))
        project.tell_left_out([(experiment, profile)])
        searched = [sum(run.result(done) is not None for run in search), len(search)]
        found[experiment.name] = {
            "search": searched, "runs": [finished, cells], "failed": failed, "to_do": cells - finished,
        }  # fmt: skip
        counts = [f"{a} of {b}" for a, b in (searched, [finished, cells])]
        shown.add_row(experiment.name, *counts, str(failed), str(cells - finished))
    print_json(found) if as_json else console.print(shown)
