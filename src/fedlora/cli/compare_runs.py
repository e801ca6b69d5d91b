"""The work of `fedlora compare`: build an experiment with one axis, run it, and show it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from fedlora.cli.batches import run_stages, worker_count
from fedlora.cli.formats import Format
from fedlora.cli.grid_parts import parse_seeds
from fedlora.cli.method_names import parse_methods, plain_label
from fedlora.cli.scores import cell_value, show_scores
from fedlora.cli.screen import NOT_WHOLE, can_write, complain, notes, plotted, tell_gone
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
from fedlora.experiments.grid import Grid
from fedlora.experiments.lost import dead_ends, is_whole, lost_of, worst_values
from fedlora.experiments.method_tables import costs, places
from fedlora.experiments.page_tables import differences, scores
from fedlora.experiments.runnable import unfit
from fedlora.experiments.runner import Outcome
from fedlora.experiments.spec import Experiment, Tune
from fedlora.experiments.tables import CellScore, placings, score_cells
from fedlora.runs.config import RunConfig, load_config, overridden
from fedlora.runs.inputs import contents
from fedlora.runs.reading import flat
from fedlora.runs.sections import MethodSection
from fedlora.workers.processes import available

_BESIDE = ("validation, best", "test, best", "test, last")  # shown beside the compared score


def compare_all(
    config: Path, methods: str, seeds: str | None, workers: str, tune: str | None, tune_seeds: str | None,
    reference: str | None, metric: str | None, sets: list[str], out: Path | None, resume: bool,
    data_root: Path | None, form: Format,
) -> None:  # fmt: skip
    """Run `fedlora compare`; its `--help` explains each argument."""
    worker_count(workers, [])  # first of all, reject what is not a number
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
    for label, why in refused.items():
        notes.warn(_not_run(label, why))  # before the others take hours
    grid = Grid(experiment, PROFILE, kept.finished())
    planned = grid.missing  # also rejects invalid configurations at once
    can_write(kept.work)
    kept.check_place(labels)
    if not resume and next(kept.folders(), None) is not None:
        raise typer.Exit(
            complain(f"{kept.work} already holds a run; add --resume to continue it, or choose another --out.")
        )
    if resume:
        tell_gone(check_read([*grid.searches, *grid.runs], kept))
        kept.restore()
    if planned:
        _say_before(base, compared, seeds is None, workers)
    before = contents(base) if planned else {}

    def again(grid: Grid, failed: Sequence[Outcome]) -> Grid:
        return Grid(grid.experiment, PROFILE, kept.finished(), *_failures(failed))

    failed = run_stages(grid, kept, workers, again=again, wanted=lambda _: True)
    if changed := [key for key, content in (contents(base) if planned else {}).items() if content != before[key]]:
        what = f"{' and '.join(changed)} changed while these runs were made, so not all of them read the same files"
        raise typer.Exit(complain(f"{what}. --resume names such a run: delete its folder, and continue with --resume."))
    kept.restore()
    _show(again(grid, failed), kept, refused, form)


def _failures(failed: Sequence[Outcome]) -> list[dict[str, str]]:
    """Digest -> reason, for runs that failed on their own, and for those that the machine failed to run."""
    return [{o.run.digest: str(o.error) for o in failed if o.by_machine == whose} for whose in (False, True)]


def _not_run(label: str, why: str) -> str:
    return f"{label} not run: {why}"


def _able(experiment: Experiment) -> tuple[Experiment, dict[str, str]]:
    """The experiment without methods that its configuration alone rules out; and those methods: label -> reason.
    Raises `typer.Exit` if no method is left."""
    whys: dict[str, str | None] = {}
    grid = Grid(experiment, PROFILE)
    for run in [*grid.runs, *grid.searches]:
        if run.cell[AXIS] not in whys:
            whys[run.cell[AXIS]] = unfit(run.config)
    refused = {label: why for label, why in whys.items() if why is not None}
    able = [label for label in experiment.axes[AXIS] if whys.get(label) is None]
    if not able:
        raise typer.Exit(complain(_none(refused)))
    reference = experiment.reference if experiment.reference in able else None
    return _of_methods(experiment, able).model_copy(update={"reference": reference}), refused


def _of_methods(experiment: Experiment, labels: Sequence[str]) -> Experiment:
    """The experiment with only these methods."""
    axis = {label: change for label, change in experiment.axes[AXIS].items() if label in labels}
    return experiment.model_copy(update={"axes": {AXIS: axis}})


def _none(whys: Mapping[str, str]) -> str:
    """Why there is nothing to compare. whys: label -> one reason."""
    told = [f"{label}: {why.rstrip('.')}" for label, why in whys.items()]
    return f"no method could run: {'; '.join(told)}"


def _no_contradiction(
    overrides: Sequence[str], seeds: str | None, tune: Tune | None, base: RunConfig, labels: Mapping[str, MethodSection]
) -> None:
    """Raises `ConfigError` if --set repeats another option, or changes a method that does not run."""
    said = flat(overridden(overrides))
    if seeds is not None and "run.seed" in said:
        raise ConfigError("--seeds and --set run.seed=... both set the seeds; give one.")
    if tune is not None and tune.key in said:
        raise ConfigError(f"--tune and --set {tune.key}=... both set {tune.key}; give one.")
    if any(key.startswith("method.") for key in said) and base.method.name not in labels:
        raise ConfigError(
            f"--set method.... changes the config's method, {base.method.name}, which is not among --methods "
            f"{', '.join(labels)}; write settings after a name, such as 'svd energy=0.9'."
        )


def _say_before(base: RunConfig, seeds: Sequence[int], by_default: bool, workers: str) -> None:
    """Print how a comparison changes its config."""
    asked = {"run.threads": base.run.threads > 1, "run.workers": base.run.workers not in (None, 1)}
    threads = "".join(f" in place of {key}" for key, more in asked.items() if more)
    more = "" if workers != "1" or available() == 1 else f"; --workers auto uses all {available()} cores"
    notes.print(f"each run uses one process and one thread{threads}, so --workers changes no result{more}")
    if len(seeds) == 1 and by_default:
        notes.warn("one seed: there will be no interval; add --seeds 0:8")


# ---- results ---------------------------------------------------------------------------------------------------------


def _show(grid: Grid, kept: ComparedRuns, refused: Mapping[str, str], form: Format) -> None:
    """Show the methods with a result. A failed one is always named and counted."""
    if not grid.used:
        raise typer.Exit(complain(_none({**refused, **_whys(grid)})))
    searched = [run for run in grid.searches if run.digest in grid.results]
    check_alike([*searched, *(run for run, _ in grid.used)], kept)
    there = dict.fromkeys(run.cell[AXIS] for run, _ in grid.used)
    reference = grid.experiment.reference or next(iter(there))
    grid = replace(grid, experiment=grid.experiment.model_copy(update={"reference": reference}))
    cells = score_cells(grid)
    if not any(cell.scores for cell in cells):
        raise ConfigError(
            f"no run has the number {grid.which()!r}: each diverged, ended before it was measured, or has a "
            f"method without it. Compare another --metric."
        )
    made = [scores(grid, list(dict.fromkeys([grid.which(), *_BESIDE]))), differences(grid), places(grid), costs(grid)]
    shared = ["One seed: no interval and no verdict. Add --seeds 0:8."] if len(grid.seeds) == 1 else []
    if grid.experiment.reference not in there and len(grid.seeds) > 1:
        shared.append(f"No differences: the reference {grid.experiment.reference} has no finished run.")
    show_scores(
        grid, "", [table for table in made if table.rows], form, first=[_not_run(*one) for one in refused.items()],
        beside=shared,
        more={
            "seeds": list(grid.seeds),
            "methods": {cell.cell[AXIS]: _value(cell, grid, kept) for cell in cells if cell.cell[AXIS] in there},
            "places": {place.label: list(place.counts) for place in placings(cells, AXIS)},
            "refused": {**refused, **dead_ends(grid)}, "dropped": worst_values(grid),
        },
    )  # fmt: skip
    plotted(_drawing(grid, kept))
    if not is_whole(grid):
        raise typer.Exit(NOT_WHOLE)


def _whys(grid: Grid) -> dict[str, str]:
    """Label -> why it has no result."""
    failed = {", ".join(one.cell.values()): one.why for one in reversed(lost_of(grid)) if one.why}
    return {**failed, **dead_ends(grid)}


def _value(cell: CellScore, grid: Grid, kept: ComparedRuns) -> dict[str, Any]:
    """A method's score on every seed, and every run's summary, for JSON."""
    mine = [run for run, _ in grid.used if run.cell == cell.cell]
    told = {run.seed: kept.folder(run).read_json("summary.json") for run in mine}
    runs = {seed: {key: x for key, x in one.items() if key != "diagnostics"} for seed, one in told.items()}
    return {**cell_value(cell), "runs": runs}


def _drawing(grid: Grid, kept: ComparedRuns) -> Callable[[], list[Path]]:
    """How to draw the picture. With all methods of the folder it is comparison.png, with fewer it carries their names,
    so it never replaces a fuller one. A method's colour depends on its place among all."""

    def draw() -> list[Path]:
        from fedlora.experiments.picture_style import save
        from fedlora.experiments.pictures import comparison_figure

        every = sorted({folder.path.relative_to(kept.work).parts[0] for folder in kept.folders()})
        mine = {folder_name(label): label for label in grid.experiment.axes[AXIS]}
        stem = Path(PICTURE).stem
        stem = stem if len(mine) == len(every) else "-".join([stem, *sorted(mine)])[:200]
        figure = comparison_figure(grid, [mine.get(name, name) for name in every])
        if figure is None:
            notes.print("no picture of one seed and one evaluated round; add --seeds 0:8, or more rounds")
            return []
        return save(figure, kept.work / f"{stem}.pdf", kept.work / f"{stem}.png")

    return draw
