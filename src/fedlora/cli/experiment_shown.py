"""`fedlora experiment table | plot | fill | report`: show the results of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from fedlora.cli.experiment_decide import decided_of
from fedlora.cli.experiment_project import Project
from fedlora.cli.formats import Format
from fedlora.cli.scores import show_scores
from fedlora.cli.screen import NOT_WHOLE, notes, plotted
from fedlora.core import files
from fedlora.errors import ConfigError
from fedlora.experiments.decided import still_open
from fedlora.experiments.decision_words import by_score, margins
from fedlora.experiments.filled_pages import Stored, asked_of, filled, read_page
from fedlora.experiments.lost import is_whole
from fedlora.experiments.page_tables import tables_of
from fedlora.experiments.prices import prices
from fedlora.experiments.report import Verdicts, write_report
from fedlora.experiments.runnable import other_files
from fedlora.experiments.seed_plan import plan_there


def show_table(project: Project, name: str, profile: str, metric: str | None, form: Format, out: Path | None) -> None:
    """Show the paper's table, scores, differences, prices and budgets, with the notes that a reader needs below. out: a
    file, instead of the screen."""
    experiment = project.planned(project.named(name), profile)
    grid = project.places.grid(experiment, profile)
    show_scores(
        grid, metric or "", tables_of(grid, metric or ""), form,
        beside=other_files(project.places.grid(experiment, profile, unclean=True).missing, grid.results),
        more={"prices": [vars(price) for price in prices(grid)]}, out=out,
    )  # fmt: skip
    project.tell_left_out([(experiment, profile)])
    if late := still_open(project.results, grid):
        notes.warn(f"Too early to judge: {late}.")
    if not is_whole(grid):
        raise typer.Exit(NOT_WHOLE)


def draw(project: Project, name: str, profile: str, out: Path | None) -> None:
    """Draw the map of verdicts and its set-ups, or the finished runs."""
    experiment = project.planned(project.named(name), profile)
    target = out or project.results / "plots" / f"{experiment.name}-{profile}.png"
    project.tell_left_out([(experiment, profile)])
    grid = project.places.grid(experiment, profile)
    asked, found = project.asked, None
    if asked is not None and profile in {family.profile for family in asked.of(experiment.name).values()}:
        found = decided_of(project, asked, experiment)
    answers = found.answers if found else ()
    if late := still_open(project.results, grid) or (found.late if found else ""):
        raise ConfigError(
            f"{late}, and nothing is drawn until all are. Continue with: fedlora experiment run "
            f"{experiment.name} --profile {profile}"
        )

    def pictures() -> list[Path]:
        from fedlora.experiments.map_picture import map_figure
        from fedlora.experiments.picture_style import save
        from fedlora.experiments.pictures import figures_of

        made = []
        for k, (score, of) in enumerate(by_score(answers).items()):
            made += save(map_figure(of), target if k == 0 else target.with_stem(f"{target.stem}-{score}"))
        figures = figures_of(grid, margins(answers))
        if not figures:
            raise ConfigError(
                f"experiment {experiment.name} has no result of profile {profile} to draw: it needs runs that were "
                f"evaluated after several rounds, or two seeds of the reference and of another label. Run more first."
            )
        for k, (name, figure) in enumerate(figures.items()):
            more = [*(["setups"] if answers else []), *([name] if k else [])]
            made += save(figure, target.with_stem("-".join([target.stem, *more])))
        return made

    plotted(pictures)


def fill_pages(project: Project, pages: Sequence[Path]) -> None:
    """Fill each page's tables from the results."""
    stored = Stored.read(project.experiments, project.results, project.asked)
    found = [(page, text, filled(text, stored)) for page in pages for text in [read_page(page)]]
    for page, text, new in found:
        if new != text:
            files.write(page.resolve(), new)  # a link stays one
        notes.print(f"{page}: {'filled' if new != text else 'as it was'}")
    asked = dict.fromkeys(pair for _, text, _ in found for pair in asked_of(text))
    project.tell_left_out([(project.named(name), profile) for name, profile in asked])


def report(project: Project, names: Sequence[str], out: Path, profile: str) -> None:
    """Write the page on these or all experiments with this profile; with "mini", on all their profiles except "paper"
    and pilots."""
    shown = [project.named(name) for name in names] or project.all
    if not shown:
        raise ConfigError(f"there are no experiments in {project.experiments}.")
    project.tell_left_out([(one, name) for one in shown for name in one.profiles])
    claims, grids, late = project.asked, [], []
    for experiment in shown:
        pilots = set() if claims is None else claims.pilots(experiment.name)
        for name in experiment.profiles:
            if name in pilots or not (name == profile or (profile == "mini" and name != "paper")):
                continue
            grid = project.places.grid(project.planned(experiment, name), name)
            if words := still_open(project.results, grid):
                late.append(f"not shown: {words}, and nothing is shown until all are.")
            else:
                grids.append(grid)
    verdicts = None
    if claims is not None:
        asked = [one for one in shown if claims.of(one.name) and plan_there(project.results, one.name) is not None]
        found = {one.name: decided_of(project, claims, one) for one in asked}
        verdicts = Verdicts(claims, {one.name: one for one in [*project.all, *shown]}, found)
        grids = [grid for grid in grids if (name := grid.experiment.name) not in found or not found[name].late]
    write_report(out, grids, verdicts)
    notes.warn(*late)
    notes.print(f"report: {out}")
