"""The work of `fedlora compare`: an experiment of one axis is made, run and shown. And what failed, for whom, why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from fedlora.cli.batches import cores, part_of, run_stages, worker_count
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
    default_metric,
    folder_name,
)
from fedlora.experiments.digits import shown
from fedlora.experiments.frames import long_records
from fedlora.experiments.grid import Grid
from fedlora.experiments.plan import dead_end, dropped_value, mains, searches
from fedlora.experiments.runnable import unfit
from fedlora.experiments.runner import Outcome, missing
from fedlora.experiments.spec import Experiment, Tune
from fedlora.experiments.tables import paired, score_cells
from fedlora.runs.config import RunConfig, load_config, overridden
from fedlora.runs.sections import MethodSection


@dataclass(frozen=True)
class Failure:
    """label: of the method. seeds: for which it failed; empty where no seed can help. dropped: the value of a search,
    as "train.lr = 1e+30", that the method does without. by_machine: it says nothing of the value, and nothing is chosen
    without it."""

    label: str
    seeds: tuple[int, ...]
    why: str
    dropped: str | None = None
    by_machine: bool = False

    def words(self) -> str:
        which = f"seed{'s' if len(self.seeds) > 1 else ''} {', '.join(map(str, self.seeds))}"
        if self.dropped is not None and self.by_machine:
            return (
                f"{self.label}: the search waits for {self.dropped}, which this machine failed to run on {which}: "
                f"{self.why.rstrip('.')}. Mend that, and --resume goes on."
            )
        if self.dropped is not None:
            return f"{self.label}: {dropped_value(self.dropped, self.seeds, self.why)}"
        return f"{self.label} failed on {which}: {self.why}" if self.seeds else f"{self.label} not run: {self.why}"

    def value(self) -> dict[str, Any]:
        """For JSON."""
        return {"method": self.label, "seeds": list(self.seeds), "why": self.why}


def compare_all(
    config: Path, methods: str, seeds: str | None, workers: str, tune: str | None, tune_seeds: str | None,
    reference: str | None, metric: str | None, sets: list[str], out: Path | None, resume: bool,
    data_root: Path | None, form: Format,
) -> None:  # fmt: skip
    """Said of each argument: `fedlora compare --help`."""
    worker_count(workers, [])  # what is no number is said before anything else
    base = load_config(config, sets)
    compared = [base.run.seed] if seeds is None else parse_seeds(seeds, "--seeds")
    labels = parse_methods(methods)
    which = metric or default_metric(base)
    search = parse_search(tune, tune_seeds)
    _no_contradiction(sets, seeds, search, base, labels)
    name = f"{config.stem}-compare"
    first = None if reference is None else plain_label(reference)
    experiment = comparison(base, labels, compared, name=name, metric=which, reference=first, tune=search)
    kept = ComparedRuns.at(out or Path("runs") / name, data_root, None if search is None else search.key)
    experiment, refused = _able(experiment)
    _say(refused)  # before hours are spent on the others
    planned = missing(experiment, PROFILE, kept)  # also says at once what is no configuration
    can_write(kept.work)
    kept.check_place(labels)
    if not resume and next(kept.folders(), None) is not None:
        raise typer.Exit(
            complain(f"{kept.work} already holds a run; add --resume to continue it, or choose another --out.")
        )
    if resume:
        done = kept.finished()
        tell_gone(check_read([*searches(experiment, PROFILE), *mains(experiment, PROFILE, done)], kept))
    if planned:
        _say_before(base, compared, seeds is None, workers)
    failed = run_stages(experiment, PROFILE, kept, workers, given_up=_given_up, wanted=lambda _: True)
    grid = Grid(experiment, PROFILE, kept.finished(), _given_up(failed))
    _show(grid, kept, [*refused, *_grouped(experiment, failed)], form)


def _able(experiment: Experiment) -> tuple[Experiment, list[Failure]]:
    """The experiment without the methods that its configuration alone shows to be impossible, and these. Raises
    `typer.Exit` where none is left."""
    whys: dict[str, str | None] = {}
    for run in [*mains(experiment, PROFILE, {}), *searches(experiment, PROFILE)]:
        if run.cell[AXIS] not in whys:
            whys[run.cell[AXIS]] = unfit(run.config)
    refused = [Failure(label, (), why) for label, why in whys.items() if why is not None]
    able = [label for label in experiment.axes[AXIS] if whys.get(label) is None]
    if not able:
        raise typer.Exit(complain(_none(refused)))
    reference = experiment.reference if experiment.reference in able else None
    return _of_methods(experiment, able).model_copy(update={"reference": reference}), refused


def _of_methods(experiment: Experiment, labels: Sequence[str]) -> Experiment:
    """Of these alone."""
    axis = {label: change for label, change in experiment.axes[AXIS].items() if label in labels}
    return experiment.model_copy(update={"axes": {AXIS: axis}})


def _none(failures: Sequence[Failure]) -> str:
    """Why there is nothing to compare: one reason a method is enough."""
    first = {f.label: f for f in reversed(failures)}
    labels = dict.fromkeys(f.label for f in failures)
    dropped = {label: f"in the search, with {f.dropped}: " if f.dropped else "" for label, f in first.items()}
    told = [f"{label}: {dropped[label]}{first[label].why.rstrip('.')}" for label in labels]
    return f"no method could run: {'; '.join(told)}"


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
            f"--set method.... is of the config's method, {base.method.name}, which is not among --methods "
            f"{', '.join(labels)}; write settings behind a name, as 'svd energy=0.9'."
        )


def _say(failures: Sequence[Failure]) -> None:
    for failure in failures:
        notes.print(failure.words(), style="yellow", markup=False, soft_wrap=True)


def _say_before(base: RunConfig, seeds: Sequence[int], by_default: bool, workers: str) -> None:
    """What a comparison does that its config does not say."""
    asked = {"run.threads": base.run.threads > 1, "run.workers": base.run.workers not in (None, 1)}
    threads = "".join(f" in place of {key}" for key, more in asked.items() if more)
    more = "" if workers != "1" or cores() == 1 else f"; --workers auto uses all {cores()} cores"
    notes.print(
        f"each run has one process and thread{threads}, so that --workers changes no number{more}", markup=False
    )
    if len(seeds) == 1 and by_default:
        notes.print("one seed: there will be no interval; add --seeds 0:8", style="yellow", markup=False)


# ---- what failed -----------------------------------------------------------------------------------------------------


def _given_up(failed: Sequence[Outcome]) -> dict[str, str]:
    """A value with a failed run is dropped, and the method goes on with the others; what the machine failed drops
    nothing: the search waits for it."""
    return {o.run.digest: str(o.error) for o in failed if o.run.searching and not o.by_machine}


def _grouped(experiment: Experiment, failed: Sequence[Outcome]) -> list[Failure]:
    """One for each method, value of its search and reason; one for a method whose values all fail for one reason that
    no seed can help."""
    tune = experiment.tune
    unfit: dict[tuple[str, str], set[float | None]] = {}
    for outcome in failed:
        if outcome.unfit:
            unfit.setdefault((outcome.run.cell[AXIS], str(outcome.error)), set()).add(part_of(outcome.run)[1])
    whole = [key for key, values in unfit.items() if None in values or (tune and values >= {*tune.values})]
    none_left = {label for label, _ in whole}
    found = [Failure(label, (), why) for label, why in whole]
    seeds: dict[tuple[str, float | None, str, bool], list[int]] = {}
    for outcome in failed:
        label, value = outcome.run.cell[AXIS], part_of(outcome.run)[1]
        if label not in none_left:
            seeds.setdefault((label, value, str(outcome.error), outcome.by_machine), []).append(outcome.run.seed)
    for (label, value, why, machine), on in seeds.items():
        dropped = None if value is None or tune is None else f"{tune.key} = {shown(value)}"
        found.append(Failure(label, tuple(sorted(on)), why, dropped, machine))
    return found


# ---- what came of it -------------------------------------------------------------------------------------------------


def _show(grid: Grid, kept: ComparedRuns, failures: list[Failure], form: Format) -> None:
    refused = {f.label for f in failures if not f.seeds}
    for cell in grid.experiment.cells(PROFILE):
        why = dead_end(grid.experiment, PROFILE, cell, grid.results, grid.failed)
        if why and cell[AXIS] not in refused:
            failures = [*failures, Failure(cell[AXIS], (), why)]
    if not grid.used:
        raise typer.Exit(complain(_none(failures)))
    searched = [run for run in searches(grid.experiment, PROFILE) if run.digest in grid.results]
    check_alike([*searched, *(run for run, _ in grid.used)], kept)
    there = {run.cell[AXIS] for run, _ in grid.used}
    experiment = _of_methods(grid.experiment, [label for label in grid.experiment.axes[AXIS] if label in there])
    reference = experiment.reference or next(iter(experiment.axes[AXIS]))
    grid = replace(grid, experiment=experiment.model_copy(update={"reference": reference}))
    cells = score_cells(grid)
    if not any(cell.scores for cell in cells):
        raise ConfigError(
            f"no run has the number {grid.which()!r}: each of them diverged or never got there. Compare another "
            f"--metric."
        )
    differences = paired(cells, AXIS, reference)
    lines = [*(f.words() for f in failures), *remarks(grid, cells, differences)]
    told = {
        **value(grid, cells, differences, kept),
        "refused": {f.label: f.why for f in failures if not f.seeds},
        "failed": [f.value() for f in failures if f.seeds and (f.dropped is None or f.by_machine)],
        "dropped": [f.words() for f in failures if f.dropped is not None and not f.by_machine],
    }
    tables = sheets(grid, cells, differences)
    show(Printed(tables, records(grid.which(), cells, differences, AXIS), told, lines, long_records(grid)), form)
    if form in (Format.csv, Format.long, Format.json):  # programs read the table: people read this
        _say(failures)
    plotted(_drawing(grid, kept))


def _drawing(grid: Grid, kept: ComparedRuns) -> Callable[[], list[Path]]:
    """Of all methods in the folder it is comparison.png, of fewer it has their names: none takes the place of more. A
    method has its colour by its place among all."""

    def draw() -> list[Path]:
        from fedlora.experiments.pictures import comparison_figure, save

        every = sorted({folder.path.relative_to(kept.work).parts[0] for folder in kept.folders()})
        mine = {folder_name(label): label for label in grid.experiment.axes[AXIS]}
        stem = Path(PICTURE).stem
        stem = stem if len(mine) == len(every) else "-".join([stem, *sorted(mine)])[:200]
        figure = comparison_figure(grid, [mine.get(name, name) for name in every])
        if figure is None:
            notes.print("no picture: one seed and one evaluated round; add --seeds 0:8, or rounds", markup=False)
            return []
        return save(figure, kept.work / f"{stem}.pdf", kept.work / f"{stem}.png")

    return draw
