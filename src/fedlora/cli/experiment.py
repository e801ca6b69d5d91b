"""`fedlora experiment`: grids of runs, and their results. This file holds the commands' texts and options, no torch.

experiment_project.py   a command's input files, and notes that all commands print
experiment_runs.py      run, retry, status            experiment_costs.py    run --plan
experiment_shown.py     table, plot, fill, report     experiment_decide.py   plan, decide
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedlora.cli.formats import Format, FormatOption, JsonAlias, chosen
from fedlora.cli.runs import WorkersHelp

Name = Annotated[str, typer.Argument(help="an experiment")]
Names = Annotated[list[str], typer.Argument(help="names of experiments/NAME.toml, or paths", show_default=False)]
ProfileName = Annotated[
    str, typer.Option("--profile", help="a profile of the experiment's file: mini, paper or another")
]
Directory = Annotated[Path, typer.Option("--experiments", help="where the experiments' files are")]
Results = Annotated[Path, typer.Option("--results", help="where results are kept")]
Work = Annotated[Path, typer.Option("--work", help="where run folders, failures, and results of uncommitted code go")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of tables")]
Claimed = Annotated[
    Path, typer.Option("--claims", help="questions and claims (if missing: claims.toml in the experiments' folder)")
]
EXPERIMENTS, RESULTS, WORK, CLAIMS = map(Path, ("experiments", "results", "runs/experiments", "docs/claims.toml"))

app = typer.Typer(help="Grids of runs from experiments/*.toml, and their results.", no_args_is_help=True)


@app.command()
def run(
    names: Names,
    profile: ProfileName = "mini",
    seeds: Annotated[str | None, typer.Option(help="only these seeds: 0:8 (eight of them), 0,3,5 or 7")] = None,
    workers: Annotated[str, WorkersHelp] = "1",
    data_root: Annotated[Path | None, typer.Option(envvar="FEDLORA_DATA_ROOT", help="folders glue, superni")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="show what would run, and run nothing")] = False,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="examples a second on another machine, to estimate --plan's hours")
    ] = None,
    experiments: Directory = EXPERIMENTS,
    results: Results = RESULTS,
    work: Work = WORK,
) -> None:
    """Run what is missing: finished runs are skipped, interrupted ones resumed, failures kept apart."""
    from fedlora.cli.experiment_project import Project
    from fedlora.cli.experiment_runs import run_missing

    project = Project(experiments, results, work, data_root=data_root)
    run_missing(project, names, profile, seeds, workers, plan, rate)


@app.command()
def retry(results: Results = RESULTS, work: Work = WORK) -> None:
    """Forget failures, so that the next `run` tries those runs again."""
    from fedlora.cli.experiment_runs import forget_failures

    forget_failures(results, work)


@app.command()
def status(
    names: Names,
    profile: ProfileName = "mini",
    experiments: Directory = EXPERIMENTS,
    results: Results = RESULTS,
    work: Work = WORK,
    json: AsJson = False,
) -> None:
    """How many runs are finished, failed and still to do."""
    from fedlora.cli.experiment_project import Project
    from fedlora.cli.experiment_runs import show_status

    show_status(Project(experiments, results, work), names, profile, json)


@app.command()
def table(
    name: Name,
    profile: ProfileName = "mini",
    metric: Annotated[str | None, typer.Option(help='as "test, best" or "validation, largest drop"')] = None,
    experiments: Directory = EXPERIMENTS,
    results: Results = RESULTS,
    work: Work = WORK,
    format: FormatOption = Format.table,
    json: JsonAlias = False,
    out: Annotated[Path | None, typer.Option(help="write a file instead; long and csv also as NAME.parquet")] = None,
) -> None:
    """The paper's table with our numbers, means and spreads over seeds, paired differences with 95 % intervals."""
    from fedlora.cli.experiment_project import Project
    from fedlora.cli.experiment_shown import show_table

    show_table(Project(experiments, results, work), name, profile, metric, chosen(format, json), out)


@app.command()
def plan(
    names: Names,
    again: Annotated[bool, typer.Option("--again", help="write a new plan, which keeps the old one in it")] = False,
    experiments: Directory = EXPERIMENTS,
    results: Results = RESULTS,
    work: Work = WORK,
    claims: Claimed = CLAIMS,
) -> None:
    """Fix the number of seeds before the main runs, from the spread of a pilot (`run NAME --profile pilot`)."""
    from fedlora.cli.experiment_decide import plan_seeds
    from fedlora.cli.experiment_project import Project

    plan_seeds(Project(experiments, results, work, claims), names, again=again)


@app.command()
def decide(
    names: Names,
    experiments: Directory = EXPERIMENTS,
    results: Results = RESULTS,
    work: Work = WORK,
    claims: Claimed = CLAIMS,
    format: FormatOption = Format.table,
    json: JsonAlias = False,
) -> None:
    """Decide each question (better, worse, equivalent or undecided) when all planned seeds have run."""
    from fedlora.cli.experiment_decide import show_answers
    from fedlora.cli.experiment_project import Project

    show_answers(Project(experiments, results, work, claims), names, chosen(format, json))


@app.command()
def plot(
    name: Name,
    out: Annotated[Path | None, typer.Option(help="picture to write (default: results/plots/NAME-PROFILE.png)")] = None,
    profile: ProfileName = "mini",
    experiments: Directory = EXPERIMENTS,
    results: Results = RESULTS,
    work: Work = WORK,
    claims: Claimed = CLAIMS,
) -> None:
    """Curves over rounds, dots of merged runs, or a map.

    If it has `budgets`: scores by epsilon. If docs/claims.toml asks about it: a heat map of the verdicts, and panels in
    NAME-setups.png."""
    from fedlora.cli.experiment_project import Project
    from fedlora.cli.experiment_shown import draw

    draw(Project(experiments, results, work, claims), name, profile, out)


@app.command()
def fill(
    pages: Annotated[list[Path], typer.Argument(help="Markdown pages with blocks to fill", show_default=False)],
    experiments: Directory = EXPERIMENTS,
    results: Results = RESULTS,
    work: Work = WORK,
    claims: Claimed = CLAIMS,
) -> None:
    """Write tables into Markdown pages, between <!-- filled: EXPERIMENT PROFILE KIND --> and <!-- end -->."""
    from fedlora.cli.experiment_project import Project
    from fedlora.cli.experiment_shown import fill_pages

    fill_pages(Project(experiments, results, work, claims), pages)


@app.command()
def report(
    names: Annotated[
        list[str] | None, typer.Argument(help="names of experiments/NAME.toml, or paths (default: all)")
    ] = None,
    out: Annotated[Path, typer.Option(help="the page to write")] = Path("results/report.html"),
    profile: ProfileName = "mini",
    experiments: Directory = EXPERIMENTS,
    results: Results = RESULTS,
    work: Work = WORK,
    claims: Claimed = CLAIMS,
) -> None:
    """One self-contained HTML page with the verdicts and all results of these experiments."""
    from fedlora.cli import experiment_shown
    from fedlora.cli.experiment_project import Project

    experiment_shown.report(Project(experiments, results, work, claims), names or [], out, profile)
