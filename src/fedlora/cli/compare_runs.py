"""The work of `fedlora compare`: build an experiment of one axis, run it, and show it.

OUT/runs/DIGEST       the run folders        OUT/results.jsonl    a line for each finished run (`fedlora.results`)
OUT/comparison.png
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from fedlora.cli.batches import watched
from fedlora.cli.formats import Format, show
from fedlora.cli.grid_parts import parse_seeds, parse_tune
from fedlora.cli.method_names import parse_methods, plain_label
from fedlora.cli.screen import NOT_WHOLE, can_write, complain, notes, plotted
from fedlora.errors import ConfigError
from fedlora.experiments.comparison import AXIS, PROFILE, SEARCH_SEED, comparison, default_metric
from fedlora.experiments.drive import Store, drive
from fedlora.experiments.grid import Grid
from fedlora.experiments.here import here, worker_count
from fedlora.experiments.spec import Experiment
from fedlora.experiments.tables import tables_of, warnings
from fedlora.experiments.tune import Progress
from fedlora.experiments.work import Work
from fedlora.runs.config import RunConfig, load_config, overridden
from fedlora.runs.drawing import check_picture
from fedlora.runs.reading import flat


@dataclass(frozen=True)
class Asked:
    """What to compare, as typed."""

    methods: str
    seeds: str | None
    tune: str | None
    tune_seeds: str | None
    reference: str | None
    metric: str | None
    margin: float | None

    def experiment(self, base: RunConfig, sets: Sequence[str], name: str) -> Experiment:
        """The methods on the configuration. Raises `ConfigError`, also if --set repeats another option, or changes a
        method that does not run."""
        labels, said = parse_methods(self.methods), flat(overridden(sets))
        seeds = [base.run.seed] if self.seeds is None else parse_seeds(self.seeds, "--seeds")
        tuned = (
            None
            if self.tune is None
            else parse_tune(self.tune, parse_seeds(self.tune_seeds or str(SEARCH_SEED), "--tune-seeds"))
        )
        if self.tune_seeds is not None and tuned is None:
            raise ConfigError(f"--tune-seeds {self.tune_seeds} sets the seeds of a search; add --tune KEY=VALUES.")
        if self.seeds is not None and "run.seed" in said:
            raise ConfigError("--seeds and --set run.seed=... both set the seeds; give one.")
        if tuned is not None and tuned.key in said:
            raise ConfigError(f"--tune and --set {tuned.key}=... both set {tuned.key}; give one.")
        if any(key.startswith("method.") for key in said) and base.method.name not in labels:
            raise ConfigError(
                f"--set method.... changes the config's method, {base.method.name}, which is not among --methods "
                f"{', '.join(labels)}; write settings after a name, such as 'svd energy=0.9'."
            )
        return comparison(
            base, labels, seeds, name=name, metric=self.metric or default_metric(base),
            reference=None if self.reference is None else plain_label(self.reference), margin=self.margin, tune=tuned,
        )  # fmt: skip


def compare_all(
    config: Path, sets: list[str], asked: Asked, workers: str, out: Path | None, resume: bool, data_root: Path | None,
    form: Format,
) -> None:  # fmt: skip
    """Run `fedlora compare`; its `--help` explains each argument."""
    worker_count(workers, [])  # first of all, reject what is not a number
    name = f"{config.stem}-compare"
    experiment = asked.experiment(load_config(config, sets), sets, name)
    folder = out or Path("runs") / name
    store, picture = Store(folder / "results.jsonl", Work(folder, data_root)), folder / "comparison.png"
    grid, refused = _able(experiment)
    notes.warn(*refused)  # before the others take hours
    grid.check_number()
    can_write(folder)
    check_picture(picture)
    if not resume and (store.results.exists() or (folder / "runs").exists()):
        raise typer.Exit(
            complain(f"{folder} already holds a run; add --resume to continue it, or choose another --out.")
        )
    if len(grid.seeds) == 1:
        notes.warn("one seed: there will be no interval; add --seeds 0:8")
    with store.held(), watched(name, store.work) as watch:
        store.forget(grid)
        failed = drive(grid, store, lambda runs: here(runs, store.work, worker_count(workers, runs)), watch)
    progress = store.progress(grid)
    if not any("failed" not in line for _, line in progress.used):
        raise typer.Exit(complain(f"no method could run: {'; '.join([*refused, *failed.values()])}"))
    remarks = [*warnings(progress), *refused, *progress.notes()]
    if len(grid.seeds) == 1:
        remarks.append("One seed: no interval and no verdict. Add --seeds 0:8.")
    show(tables_of(progress), remarks, form)
    plotted(lambda: _draw(progress, picture))
    if not progress.whole:
        raise typer.Exit(NOT_WHOLE)


def _able(experiment: Experiment) -> tuple[Grid, list[str]]:
    """The methods that their configuration lets run, and a line for each of the others. Raises `typer.Exit` if none is
    left."""
    faults = Grid(experiment, PROFILE).faults()
    refused = [f"{label} not run: {why}" for (label,), why in faults.items()]
    able = [label for label in experiment.axes[AXIS] if (label,) not in faults]
    if not able:
        raise typer.Exit(complain(f"no method could run: {'; '.join(refused)}"))
    reference = experiment.reference if experiment.reference in able else able[0]
    left = experiment.without([{AXIS: label} for (label,) in faults])
    return Grid(left.model_copy(update={"reference": reference}), PROFILE), refused


def _draw(progress: Progress, picture: Path) -> list[Path]:
    from fedlora.experiments.pictures import drawn

    if not (made := drawn(progress, picture)):
        notes.print("no picture of one seed and one evaluated round; add --seeds 0:8, or more rounds")
    return made
