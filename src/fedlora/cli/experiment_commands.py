"""`fedlora experiment run | retry | status | table | fill | report`: grids of runs, and what came of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fedlora.cli.batches import run_batch, worker_count
from fedlora.cli.experiment_costs import show_plan
from fedlora.cli.experiment_decide import read_answers
from fedlora.cli.experiment_files import (
    CLAIMS,
    EXPERIMENTS,
    RESULTS,
    WORK,
    AsJson,
    Claimed,
    Directory,
    Names,
    ProfileName,
    Results,
    Work,
    beside,
    load_named,
    tell,
    tell_left_out,
    there,
)  # fmt: skip
from fedlora.cli.formats import Format, FormatOption, JsonAlias, Printed, Sheet, chosen, show
from fedlora.cli.runs import WorkersHelp
from fedlora.cli.scores import cell_value, difference_sheet, direction, records, score_sheet, widen_lines
from fedlora.cli.screen import Table, complain, console, notes, print_json
from fedlora.cli.seeds import parse_seeds
from fedlora.core import files
from fedlora.errors import ConfigError, counted
from fedlora.experiments.claims import load_claims
from fedlora.experiments.filled_pages import Stored, asked_of, failed_here, filled, read_page
from fedlora.experiments.plan import (
    PlannedRun,
    check_number,
    check_runnable,
    chosen_value,
    dead_end,
    mains,
    missing_files,
    other_files,
    searches,
    worst_values,
)
from fedlora.experiments.report import write_report
from fedlora.experiments.result import Result, unclean_lines
from fedlora.experiments.runner import Outcome, Places, missing
from fedlora.experiments.scores import parse_number, titled
from fedlora.experiments.seed_plan import awaited, open_plans
from fedlora.experiments.spec import Experiment, load_all
from fedlora.experiments.store import forget_failed
from fedlora.experiments.tables import (
    SIMULATIONS,
    budget_rows,
    long_records,
    measured_by,
    paired,
    price_rows,
    prices,
    score_cells,
    spendings,
    without_number,
)
from fedlora.runs.attack_words import attacks_of


def run(
    names: Names,
    profile: ProfileName = "mini",
    seeds: Annotated[str | None, typer.Option(help="only these seeds: 0:8 (eight of them), 0,3,5 or 7")] = None,
    workers: Annotated[str, WorkersHelp] = "1",
    data_root: Annotated[Path | None, typer.Option(envvar="FEDLORA_DATA_ROOT", help="folders glue, superni")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="say what would be run, and run nothing")] = False,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="examples a second that another machine trains, for --plan's hours")
    ] = None,
    budget: Annotated[float | None, typer.Option(min=0.0, help="hours after which no further run is started")] = None,
    experiments: Directory = EXPERIMENTS,
    results: Results = RESULTS,
    work: Work = WORK,
) -> None:
    """Run what is missing: finished runs are skipped, interrupted ones resumed, failures kept apart."""
    places = Places(results, work, data_root)
    loaded = [load_named(name, experiments) for name in names]
    only = None if seeds is None else parse_seeds(seeds, "--seeds")
    _check(loaded, profile, places, only)
    if rate is not None and not plan:
        raise ConfigError("--rate is for --plan, which tells hours by it: give both, or leave it out.")
    if plan:
        show_plan(loaded, profile, places, only, rate)
        return
    for experiment in loaded:
        todo = missing(experiment, profile, places, only, places.given_up())
        if gone := missing_files(todo):
            raise ConfigError(f"experiment {experiment.name}: {' '.join(gone)}")
        tell(other_files(todo, places.finished(unclean=True)))
    failed: list[Outcome] = []
    until = time.monotonic() + budget * 3600 if budget is not None else None

    def wanted(run: PlannedRun) -> bool:
        return until is None or time.monotonic() < until

    def heard(outcome: Outcome) -> None:
        if outcome.error is not None:
            failed.append(outcome)

    for experiment in loaded:
        for _ in range(2):  # the search, then what it decides
            todo = missing(experiment, profile, places, only, places.given_up())
            todo = [run for run in todo if not places.failure(run).exists()]
            run_batch(experiment.name, todo, places, worker_count(workers, todo), wanted, heard)
    gone_without = _gone_without(loaded, profile, places)
    tell_left_out(places, [(experiment, profile) for experiment in loaded])
    if until is not None and time.monotonic() > until:
        notes.print("the budget is used up; run again to go on", style="yellow")
    failed = [outcome for outcome in failed if outcome.run.digest not in gone_without]
    for outcome in failed:
        notes.print(f"failed: {outcome.run.label}: {outcome.error}", style="red", markup=False, soft_wrap=True)
    if failed:
        lost = f"{counted(len(failed), 'run')} failed; see {work / 'failures'}. Mend the cause, then: fedlora "
        raise typer.Exit(complain(f"{lost}experiment retry --work {work}, and run again."))


def _check(loaded: list[Experiment], profile: str, places: Places, only: list[int] | None) -> None:
    """Raises `ConfigError` for what can be known before anything runs."""
    for experiment in loaded:
        known = experiment.profile(profile).seeds
        if unknown := sorted({*(only or [])} - {*known}):
            raise ConfigError(
                f"--seeds {unknown[0]} is no seed of {experiment.name}, profile {profile}: it has "
                f"{', '.join(map(str, known))}."
            )
        check_number(experiment, profile, experiment.profile(profile).metric or experiment.metric)
        check_runnable(missing(experiment, profile, places, only, places.given_up()))


def _gone_without(loaded: list[Experiment], profile: str, places: Places) -> set[str]:
    """The failed runs of searches that chose all the same; what the searches did not choose is told."""
    done, given_up = places.finished(unclean=True), places.given_up()
    found = set()
    for experiment in loaded:
        tell(_of_searches(experiment, profile, places, done))
        for run in searches(experiment, profile):
            if run.digest in given_up and chosen_value(experiment, profile, run.cell, done, given_up) is not None:
                found.add(run.digest)
    return found


def retry(results: Results = RESULTS, work: Work = WORK) -> None:
    """Forget failures, so that the next `run` tries those runs again."""
    found = sorted((work / "failures").glob("*.json"))
    forget_failed(results, {path.stem for path in found})
    for path in found:
        path.unlink()
    notes.print(f"{len(found)} failures forgotten")


def status(
    names: Names,
    profile: ProfileName = "mini",
    experiments: Directory = EXPERIMENTS,
    results: Results = RESULTS,
    work: Work = WORK,
    json: AsJson = False,
) -> None:
    """How many runs are finished, failed and still to do."""
    places = Places(results, work, None)
    done = places.finished(unclean=True)
    table = Table("experiment", "search", "runs", "failed", "to do", title=f"Experiments, profile {profile}")
    found: dict[str, Any] = {}
    for name in names:
        experiment = load_named(name, experiments)
        search, given_up = searches(experiment, profile), places.given_up()
        cells = sum(1 for _ in experiment.cells(profile)) * len(experiment.profile(profile).seeds)
        finished = sum(run.result(done) is not None for run in mains(experiment, profile, done, given_up))
        left = missing(experiment, profile, places, None, given_up)
        failed = sum(places.failure(run).exists() for run in left)
        tell(other_files(left, done))
        tell_left_out(places, [(experiment, profile)])
        found[experiment.name] = {
            "search": [sum(run.result(done) is not None for run in search), len(search)],
            "runs": [finished, cells], "failed": failed, "to_do": cells - finished,
        }  # fmt: skip
        f = found[experiment.name]
        shown = [f"{a} of {b}" for a, b in (f["search"], f["runs"])]
        table.add_row(experiment.name, *shown, str(failed), str(f["to_do"]))
    if json:
        print_json(found)
    else:
        console.print(table)


def show_table(
    name: Annotated[str, typer.Argument(help="an experiment")],
    profile: ProfileName = "mini",
    metric: Annotated[str | None, typer.Option(help='as "test, best" or "validation, largest drop"')] = None,
    experiments: Directory = EXPERIMENTS,
    results: Results = RESULTS,
    work: Work = WORK,
    format: FormatOption = Format.table,
    json: JsonAlias = False,
) -> None:
    """Means and spreads over seeds, and paired differences with 95 % intervals."""
    experiment = load_named(name, experiments)
    which = metric or experiment.profile(profile).metric or experiment.metric
    parse_number(which)
    places = Places(results, work, None)
    done, given_up = places.finished(), places.given_up()
    cells = score_cells(experiment, profile, done, metric, given_up)
    reference, axis, title = experiment.reference, experiment.rows[0], titled(which, measured_by(cells))
    differences = paired(cells, axis, reference) if reference else []
    sheets = [score_sheet(f"{experiment.title}: {title}, mean ± sd", {which: cells}, list(experiment.axes))]
    if differences:
        sheets.append(difference_sheet(f"{title}: against {reference}, paired by seed", differences))
    found = prices(experiment, profile, done, failed=given_up)
    for score in dict.fromkeys(price.score for price in found):
        told = f"Held-out {score}, and in brackets what a {axis} costs or saves against {reference}"
        sheets.append(Sheet(told, *price_rows(found, score)))
    if experiment.budgets is not None and (spent := spendings(experiment, profile, done, given_up)):
        sheets.append(Sheet("What each cell spent, and its scores", *budget_rows(spent, experiment.budgets.lines)))
    runs = mains(experiment, profile, done, given_up)
    used = {run.digest: result for run in runs if (result := run.result(done)) is not None}
    attacks = attacks_of([result.settings.model_dump() for result in used.values()])
    remarks = [f"UNDER ATTACK, on purpose: {what}. Nothing of these runs is for use." for what in attacks]
    if any(result.privacy for result in used.values()):
        remarks.append(f"{SIMULATIONS} None of this is an account of anybody's data.")
    loud = " ".join(remarks)
    remarks += [*without_number(cells), *direction(which, cells), *_of_searches(experiment, profile, places, done)]
    remarks += [*widen_lines(experiment, profile, cells), *unclean_lines(used.values())]
    remarks += other_files(missing(experiment, profile, places, None, given_up), done)
    value = {
        "metric": which, "score": measured_by(cells), "cells": [cell_value(c) for c in cells],
        "differences": [vars(d) for d in differences], "prices": [vars(price) for price in found], "attacks": attacks,
        "not_for_use": loud,
    }  # fmt: skip
    lines = [{**line, "not_for_use": loud} if loud else line for line in records(which, cells, differences, axis)]
    by_round = long_records(experiment, profile, done, given_up) if format is Format.long else []
    show(Printed(sheets, lines, value, remarks, by_round), chosen(format, json))
    tell_left_out(places, [(experiment, profile)])
    late = awaited(open_plans(results, beside(experiment, experiments), done, given_up), {*used})
    tell([f"A look before its time: {one.words}." for one in late])


def fill(
    pages: Annotated[list[Path], typer.Argument(help="Markdown pages with blocks to fill", show_default=False)],
    experiments: Directory = EXPERIMENTS,
    results: Results = RESULTS,
    work: Work = WORK,
    claims: Claimed = CLAIMS,
) -> None:
    """Write tables into Markdown pages, between <!-- filled: EXPERIMENT PROFILE KIND --> and <!-- end -->."""
    there(claims)
    places = Places(results, work, None)
    stored = Stored.read(experiments, results, claims)
    found = [(page, text, filled(text, stored)) for page in pages for text in [read_page(page)]]
    for page, text, new in found:
        if new != text:
            files.write(page.resolve(), new)  # a link stays one
        notes.print(f"{page}: {'filled' if new != text else 'as it was'}", markup=False, highlight=False)
    asked = dict.fromkeys(pair for _, text, _ in found for pair in asked_of(text))
    tell_left_out(places, [(load_named(name, experiments), profile) for name, profile in asked])
    tell(failed_here(asked, stored, places.reports()))


def report(
    out: Annotated[Path, typer.Option(help="the page to write")] = Path("results/report.html"),
    profile: ProfileName = "mini",
    experiments: Directory = EXPERIMENTS,
    results: Results = RESULTS,
    work: Work = WORK,
    claims: Claimed = CLAIMS,
) -> None:
    """One self-contained HTML page: what is decided, and all that has results."""
    loaded = load_all(experiments)
    if not loaded:
        raise ConfigError(f"there are no experiments in {experiments}.")
    places = Places(results, work, None)
    tell_left_out(places, [(one, name) for one in loaded for name in one.profiles])
    decided, past = read_answers(load_claims(claims), loaded, places) if there(claims) else (None, {})
    done, failed = places.finished(), places.given_up()
    waiting = open_plans(results, loaded, done, failed)
    write_report(
        out, loaded, profile, done, experiments / "paper_numbers.toml", failed, decided,
        {digest for one in waiting for digest in one.digests}, past,
    )  # fmt: skip
    tell([f"not shown: {one.words}, and nothing of it is shown before all of them are." for one in waiting])
    notes.print(f"report: {out}", soft_wrap=True, highlight=False, markup=False)


# -------------------------------------------------------------------------------------------------------- inside


def _of_searches(experiment: Experiment, profile: str, places: Places, results: Mapping[str, Result]) -> list[str]:
    """A line for each value that counts as the worst of its search, and for each cell whose search chose nothing."""
    given_up = places.given_up()
    found = [(cell, dead_end(experiment, profile, cell, results, given_up)) for cell in experiment.cells(profile)]
    worst = worst_values(experiment, profile, results, given_up)
    return worst + [f"{', '.join(cell.values())} not run: {why}" for cell, why in found if why is not None]
