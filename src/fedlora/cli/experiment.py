"""`fedlora experiment`: grids of runs, and their results. This file holds the commands' texts and options, no torch.

experiment_project.py   a command's folders and files
experiment_runs.py      run, retry, status            experiment_costs.py    run --plan
experiment_clusters.py  sbatch, run --on
experiment_shown.py     table, plot
"""

from __future__ import annotations

from enum import StrEnum
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
Work = Annotated[Path, typer.Option("--work", help="where run folders and failures go")]
Seeds = Annotated[str | None, typer.Option(help="only these seeds: 0:8 (eight of them), 0,3,5 or 7")]
DataRoot = Annotated[Path | None, typer.Option(envvar="FEDLORA_DATA_ROOT", help="folders glue, superni")]
Only = Annotated[str | None, typer.Option(help='only these labels of axes: "task=SST-2,method=GLoRA,method=FedIT"')]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of tables")]
EXPERIMENTS, RESULTS, WORK = map(Path, ("experiments", "results", "runs/experiments"))


class Machines(StrEnum):
    """Where runs go on."""

    here = "here"
    ray = "ray"


app = typer.Typer(help="Grids of runs from experiments/*.toml, and their results.", no_args_is_help=True)


@app.command()
def run(
    names: Names,
    profile: ProfileName = "mini",
    seeds: Seeds = None,
    only: Only = None,
    shard: Annotated[str | None, typer.Option(metavar="I/N", help="only the I-th of N parts of the runs")] = None,
    workers: Annotated[str, WorkersHelp] = "1",
    data_root: DataRoot = None,
    plan: Annotated[bool, typer.Option("--plan", help="show what would run, and run nothing")] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="time a few steps of each kind of run on this device, for --plan's hours")
    ] = False,
    price: Annotated[float | None, typer.Option(min=0, help="of an hour of one process, for --plan's costs")] = None,
    on: Annotated[Machines, typer.Option(help="this machine, or a Ray cluster that runs already")] = Machines.here,
    address: Annotated[str | None, typer.Option(help="of the Ray cluster (default: RAY_ADDRESS, or here)")] = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs of a run on Ray (default: 1 if it has GPUs)")] = None,
    memory: Annotated[str | None, typer.Option(help="memory of a run on Ray: 16G")] = None,
    experiments: Directory = EXPERIMENTS,
    results: Results = RESULTS,
    work: Work = WORK,
) -> None:
    """Run what is missing: finished runs are skipped, interrupted ones resumed, failures kept apart."""
    from fedlora.cli.experiment_clusters import cluster
    from fedlora.cli.experiment_project import Project
    from fedlora.cli.experiment_runs import run_missing

    there = cluster(on, address, gpus, memory, workers)
    project = Project(experiments, results, work, data_root=data_root)
    run_missing(project, names, profile, seeds, workers, plan, measure, price, only=only, shard=shard, cluster=there)


@app.command()
def sbatch(
    names: Names,
    time: Annotated[str, typer.Option(help="the time limit of a task, as Slurm takes it: 04:00:00")],
    shards: Annotated[int, typer.Option(min=1, help="number of tasks, each with a part of the runs")] = 1,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs of a task")] = 0,
    memory: Annotated[str | None, typer.Option(help="memory of a task, as Slurm takes it: 16G")] = None,
    option: Annotated[list[str] | None, typer.Option(help="a further option of sbatch: --partition=gpu")] = None,
    out: Annotated[Path | None, typer.Option(help="the script (default: WORK/slurm/NAME-PROFILE.sh)")] = None,
    profile: ProfileName = "mini",
    seeds: Seeds = None,
    only: Only = None,
    workers: Annotated[str, WorkersHelp] = "1",
    data_root: DataRoot = None,
    experiments: Directory = EXPERIMENTS,
    results: Results = RESULTS,
    work: Work = WORK,
) -> None:
    """Write a script for Slurm: an array of tasks, first for the search, then for the runs that count.

    All folders must be shared by the nodes. A task whose node dies, or whose time ends, is queued again and resumes."""
    from fedlora.cli.experiment_clusters import write_script
    from fedlora.cli.experiment_project import Project

    project = Project(experiments, results, work, data_root=data_root)
    write_script(project, names, profile, seeds, only, workers, shards, time, gpus, memory, option or [], out)


@app.command()
def retry(results: Results = RESULTS, work: Work = WORK) -> None:
    """Forget failures, so that the next `run` tries those runs again."""
    from fedlora.cli.experiment_runs import forget_failures

    forget_failures(results, work)


@app.command()
def status(
    names: Names,
    profile: ProfileName = "mini",
    only: Only = None,
    experiments: Directory = EXPERIMENTS,
    results: Results = RESULTS,
    work: Work = WORK,
    json: AsJson = False,
) -> None:
    """How many runs are finished, failed and still to do."""
    from fedlora.cli.experiment_project import Project
    from fedlora.cli.experiment_runs import show_status

    show_status(Project(experiments, results, work), names, profile, json, only=only)


@app.command()
def table(
    name: Name,
    profile: ProfileName = "mini",
    metric: Annotated[str | None, typer.Option(help='as "test, best" or "rounds to 0.92"')] = None,
    experiments: Directory = EXPERIMENTS,
    results: Results = RESULTS,
    work: Work = WORK,
    format: FormatOption = Format.table,
    json: JsonAlias = False,
    out: Annotated[Path | None, typer.Option(help="write this file instead")] = None,
) -> None:
    """The paper's table with our numbers, means and spreads over seeds, paired differences with 95 % intervals."""
    from fedlora.cli.experiment_project import Project
    from fedlora.cli.experiment_shown import show_table

    show_table(Project(experiments, results, work), name, profile, metric, chosen(format, json), out)


@app.command()
def plot(
    name: Name,
    out: Annotated[Path | None, typer.Option(help="picture to write (default: results/plots/NAME-PROFILE.png)")] = None,
    profile: ProfileName = "mini",
    experiments: Directory = EXPERIMENTS,
    results: Results = RESULTS,
    work: Work = WORK,
) -> None:
    """Curves over rounds, or dots of runs evaluated once."""
    from fedlora.cli.experiment_project import Project
    from fedlora.cli.experiment_shown import draw

    draw(Project(experiments, results, work), name, profile, out)
