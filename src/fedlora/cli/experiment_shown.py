"""`fedlora experiment table | plot`: show the results of runs."""

from __future__ import annotations

from pathlib import Path

import typer

from fedlora.cli.experiment import Project
from fedlora.cli.experiment_runs import kept, named
from fedlora.cli.formats import Format, show
from fedlora.cli.screen import NOT_WHOLE, plotted
from fedlora.errors import ConfigError
from fedlora.experiments.grid import Grid
from fedlora.experiments.paper import paper_of, paper_tables
from fedlora.experiments.tables import tables_of, warnings


def show_table(
    project: Project, name: str, profile: str, metric: str | None, margin: float | None, form: Format
) -> None:
    """Show the paper's table, scores, differences and costs, with the notes that a reader needs below."""
    experiment = named(project, name)
    progress = kept(project, experiment).progress(Grid(experiment, profile))
    paper = paper_of(experiment)
    printed = [] if paper is None or form is Format.csv else paper_tables(progress, paper, metric)
    show([*printed, *tables_of(progress, metric, margin)], [*warnings(progress), *progress.notes()], form)
    if not progress.whole:
        raise typer.Exit(NOT_WHOLE)


def draw(project: Project, name: str, profile: str, out: Path | None) -> None:
    """Draw the finished runs."""
    experiment = named(project, name)
    target = out or project.results / "plots" / f"{experiment.name}-{profile}.png"
    progress = kept(project, experiment).progress(Grid(experiment, profile))

    def pictures() -> list[Path]:
        from fedlora.experiments.pictures import drawn

        if not (made := drawn(progress, target)):
            raise ConfigError(
                f"experiment {experiment.name} has no result of profile {profile} to draw: it needs runs that were "
                f"evaluated after several rounds, or two seeds of the reference and of another label. Run more first."
            )
        return made

    plotted(pictures)
