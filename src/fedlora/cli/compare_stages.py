"""The work of `fedlora compare`: the search, the runs that it decides, and their tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from fedlora.cli.batches import worker_count
from fedlora.cli.compare_found import Found, gather
from fedlora.cli.compare_runs import Failure, Ran, run_stages, say_before
from fedlora.cli.compare_tables import remarks, sheets, value
from fedlora.cli.formats import Format, Printed, show
from fedlora.cli.method_names import parse_methods, plain_label
from fedlora.cli.scores import records
from fedlora.cli.screen import can_write, complain, notes, plotted, tell_gone
from fedlora.cli.seeds import parse_seeds
from fedlora.cli.tuning import parse_search
from fedlora.errors import ConfigError
from fedlora.experiments.comparison import (
    AXIS,
    PICTURE,
    PROFILE,
    ComparedRuns,
    check_alike,
    check_read,
    comparison,
    folder_name,
)
from fedlora.experiments.plan import dead_end, mains, searches, unfit
from fedlora.experiments.result import Result
from fedlora.experiments.runner import missing
from fedlora.experiments.spec import Experiment, Tune
from fedlora.experiments.tables import long_records
from fedlora.runs.config import RunConfig, load_config, overridden
from fedlora.runs.sections import MethodSection


def compare_all(
    config: Path,
    methods: str,
    seeds: str | None,
    workers: str,
    tune: str | None,
    tune_seeds: str | None,
    reference: str | None,
    metric: str | None,
    sets: list[str],
    out: Path | None,
    resume: bool,
    data_root: Path | None,
    form: Format,
) -> None:
    """Said of each argument: `fedlora compare --help`."""
    worker_count(workers, [])  # what is no number is said before anything else
    base = load_config(config, sets)
    if base.privacy is not None:
        raise ConfigError(
            "[privacy] and compare do not go together: every run of it, searches included, would be charged to the "
            "clients' ledger, and the first would leave nothing for the others. Compare on public data without the "
            "table; then fedlora run."
        )
    compared = [base.run.seed] if seeds is None else parse_seeds(seeds, "--seeds")
    labels = parse_methods(methods)
    which = metric or default_metric(base)
    search = parse_search(tune, tune_seeds)
    _no_contradiction(sets, seeds, search, base, labels)
    name = f"{config.stem}-compare"
    experiment = comparison(
        base,
        labels,
        compared,
        name=name,
        metric=which,
        reference=None if reference is None else plain_label(reference),
        tune=search,
    )
    kept = ComparedRuns.at(out or Path("runs") / name, data_root, None if search is None else search.key)
    experiment, refused = _able(experiment)
    for failure in refused:  # before hours are spent on the others
        notes.print(failure.words(), style="yellow", markup=False, soft_wrap=True)
    planned = missing(experiment, PROFILE, kept)  # also says at once what is no configuration
    can_write(kept.work)
    kept.check_place(labels)
    if not resume and next(kept.folders(), None) is not None:
        raise typer.Exit(
            complain(f"{kept.work} already holds a run; add --resume to go on with it, or choose another --out.")
        )
    if resume:
        done = kept.finished()
        tell_gone(check_read([*searches(experiment, PROFILE), *mains(experiment, PROFILE, done)], kept))
    if planned:
        say_before(base, compared, seeds is None, workers)
    ran = run_stages(experiment, kept, workers)
    _print(experiment, kept, Ran([*refused, *ran.failures], ran.given_up), form)


def _able(experiment: Experiment) -> tuple[Experiment, list[Failure]]:
    """The experiment without the methods that its configuration alone shows to be impossible, and these. Raises
    `typer.Exit` where none is left."""
    whys = {}
    for run in [*mains(experiment, PROFILE, {}), *searches(experiment, PROFILE)]:
        if run.cell[AXIS] not in whys:
            whys[run.cell[AXIS]] = unfit(run.config)
    refused = [Failure(label, (), why) for label, why in whys.items() if why is not None]
    able = {label: change for label, change in experiment.axes[AXIS].items() if whys.get(label) is None}
    if not able:
        told = "; ".join(f"{one.label}: {one.reason()}" for one in refused)
        raise typer.Exit(complain(f"no method could run: {told}"))
    reference = experiment.reference if experiment.reference in able else None
    return experiment.model_copy(update={"axes": {AXIS: able}, "reference": reference}), refused


def _no_contradiction(
    overrides: Sequence[str], seeds: str | None, tune: Tune | None, base: RunConfig, labels: Mapping[str, MethodSection]
) -> None:
    """Raises `ConfigError` where --set says what another option says, or says it to nobody."""
    said = overridden(overrides)
    if seeds is not None and "seed" in said.get("run", {}):
        raise ConfigError("--seeds and --set run.seed=... both say which seeds; give one.")
    if tune is not None:
        there: Any = said
        for part in tune.key.split("."):
            there = there.get(part) if isinstance(there, Mapping) else None
        if there is not None:
            raise ConfigError(f"--tune and --set {tune.key}=... both say what {tune.key} is; give one.")
    if "method" in said and base.method.name not in labels:
        raise ConfigError(
            f"--set method.... is of the config's method, {base.method.name}, which is none of --methods "
            f"{', '.join(labels)}; write settings behind a name, as 'svd energy=0.9'."
        )


def default_metric(base: RunConfig) -> str:
    """The test set at the round that is best on validation; without validation data at the last; without a test set
    validation. Raises `ConfigError` where there is neither."""
    if base.data.task is not None:
        return "test, best"
    if base.data.test != 0 or base.clients.own_test is not None:
        return "test, best" if base.data.validation != 0 else "test, last"
    if base.data.validation == 0:
        raise ConfigError("data.validation and data.test are both 0: there is nothing to compare methods by.")
    return "validation, best"


# ------------------------------------------------------------------------------------------------------- showing


def _print(experiment: Experiment, kept: ComparedRuns, ran: Ran, form: Format) -> None:
    results, failures = kept.finished(), ran.failures
    runs: dict[str, dict[int, Result]] = {}
    for run in mains(experiment, PROFILE, results, ran.given_up):
        if run.digest in results:
            runs.setdefault(run.cell[AXIS], {})[run.seed] = results[run.digest]
    cells = list(experiment.cells(PROFILE))
    ends = {cell[AXIS]: dead_end(experiment, PROFILE, cell, results, ran.given_up) for cell in cells}
    refused = {f.label for f in failures if not f.seeds}
    failures = [*failures, *(Failure(label, (), why) for label, why in ends.items() if why and label not in refused)]
    if not runs:
        first = {f.label: f for f in reversed(failures)}  # one reason a method is enough
        labels = dict.fromkeys(f.label for f in failures)
        why = "; ".join(f"{label}: {first[label].reason()}" for label in labels)
        raise typer.Exit(complain(f"no method could run: {why}"))
    counted = [*searches(experiment, PROFILE), *mains(experiment, PROFILE, results, ran.given_up)]
    check_alike([run for run in counted if run.digest in results], kept)
    found = gather(experiment, results, runs, ran.given_up)
    lines = [*(f.words() for f in failures), *remarks(found)]
    each = records(found.which, found.cells, found.differences, AXIS)
    by_round = long_records(experiment, PROFILE, results, ran.given_up)

    def summary(label: str, seed: int) -> Mapping[str, Any]:
        each = mains(experiment, PROFILE, results, ran.given_up)
        run = next(run for run in each if (run.cell[AXIS], run.seed) == (label, seed))
        told = kept.folder(run).read_json("summary.json")
        return {key: value for key, value in told.items() if key != "diagnostics"}

    show(Printed(sheets(found), each, value(found, failures, summary), lines, by_round), form)
    if form in (Format.csv, Format.long, Format.json):  # programs read the table: people read this
        for failure in failures:
            notes.print(failure.words(), style="yellow", markup=False, soft_wrap=True)
    plotted(_drawing(experiment, found, kept, ran))


def _drawing(experiment: Experiment, found: Found, kept: ComparedRuns, ran: Ran) -> Callable[[], list[Path]]:
    """Of all methods in the folder it is comparison.png, of fewer it has their names: none takes the place of more. A
    method has its colour by its place among all."""

    def draw() -> list[Path]:
        from fedlora.experiments.pictures import dots, plot_comparison

        every = sorted({folder.path.relative_to(kept.work).parts[0] for folder in kept.folders()})
        mine = {folder_name(label): label for label in found.runs}
        order = [mine.get(name, name) for name in every]
        whole = len(mine) == len(every)
        stem = Path(PICTURE).stem if whole else "-".join([Path(PICTURE).stem, *sorted(mine)])[:200]
        asked = experiment.model_copy(update={"reference": found.reference})
        panels = dots(asked, PROFILE, found.results, ran.given_up)
        files = [kept.work / f"{stem}.pdf", kept.work / f"{stem}.png"]
        made = plot_comparison(found.runs, panels, found.which, order, files)
        if not made:
            notes.print("no picture: one seed and one evaluated round; add --seeds 0:8, or rounds", markup=False)
        return made

    return draw
