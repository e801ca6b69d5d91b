"""`fedlora experiment table | plot`: show the results of runs."""

from __future__ import annotations

from pathlib import Path

import typer

from fedlora.cli.experiment_project import Project
from fedlora.cli.formats import Format
from fedlora.cli.scores import show_scores
from fedlora.cli.screen import NOT_WHOLE, plotted
from fedlora.errors import ConfigError
from fedlora.experiments.lost import is_whole
from fedlora.experiments.page_tables import tables_of
from fedlora.experiments.runnable import other_files


def show_table(project: Project, name: str, profile: str, metric: str | None, form: Format, out: Path | None) -> None:
    """Show the paper's table, scores and differences, with the notes that a reader needs below. out: a
    file, instead of the screen."""
    experiment = project.named(name)
    grid = project.places.grid(experiment, profile)
    show_scores(
        grid, metric or "", tables_of(grid, metric or ""), form,
        beside=other_files(grid.missing, grid.results), out=out,
    )  # fmt: skip
    if not is_whole(grid):
        raise typer.Exit(NOT_WHOLE)


def draw(project: Project, name: str, profile: str, out: Path | None) -> None:
    """Draw the finished runs."""
    experiment = project.named(name)
    target = out or project.results / "plots" / f"{experiment.name}-{profile}.png"
    grid = project.places.grid(experiment, profile)

    def pictures() -> list[Path]:
        from fedlora.experiments.picture_style import save
        from fedlora.experiments.pictures import figures_of

        figures = figures_of(grid)
        if not figures:
            raise ConfigError(
                f"experiment {experiment.name} has no result of profile {profile} to draw: it needs runs that were "
                f"evaluated after several rounds, or two seeds of the reference and of another label. Run more first."
            )
        made = []
        for k, (name, figure) in enumerate(figures.items()):
            made += save(figure, target.with_stem(f"{target.stem}-{name}") if k else target)
        return made

    plotted(pictures)
