"""`fedlora experiment`: grids of runs, and their results. This file holds the commands' texts and options, no torch.

experiment_runs.py   run, tune, status            experiment_shown.py   table, plot
"""

from __future__ import annotations

from dataclasses import dataclass
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
WorkFolder = Annotated[Path, typer.Option("--work-dir", help="where run folders and failures go")]
Seeds = Annotated[str | None, typer.Option(help="only these seeds: 0:8 (eight of them), 0,3,5 or 7")]
DataRoot = Annotated[Path | None, typer.Option(envvar="FEDLORA_DATA_ROOT", help="folders glue, superni")]
Only = Annotated[
    str | None, typer.Option("--filter", help='only these labels of axes: "task=SST-2,method=GLoRA,method=FedIT"')
]
Again = Annotated[bool, typer.Option("--force", help="first forget the failures of these runs, and try them again")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of tables")]
EXPERIMENTS, RESULTS, WORK = map(Path, ("experiments", "results", "runs/experiments"))


class Machines(StrEnum):
    """Where runs go on."""

    here = "here"
    slurm = "slurm"
    ray = "ray"


Backend = Annotated[
    Machines, typer.Option("--backend", help="this machine, an array job on Slurm, or a Ray cluster that runs already")
]
Address = Annotated[str | None, typer.Option(help="of the Ray cluster (default: RAY_ADDRESS, or here)")]
Gpus = Annotated[int | None, typer.Option(min=0, help="GPUs of a run on Slurm, or on Ray (default there: 1 if it has)")]
Memory = Annotated[str | None, typer.Option(help="memory of a run on Slurm or Ray: 16G")]
Time = Annotated[str | None, typer.Option(help="the time limit of a run on Slurm, as it takes it: 04:00:00")]
Options = Annotated[list[str] | None, typer.Option("--option", help="a further option of sbatch: --partition=gpu")]
NoWait = Annotated[
    bool, typer.Option("--no-wait", help="on Slurm: submit and return; one more job calls this command when they end")
]


@dataclass(frozen=True)
class Project:
    """The folders of a command. experiments: of the files. results: of the lines. work: of runs and failures."""

    experiments: Path
    results: Path
    work: Path
    data_root: Path | None = None


@dataclass(frozen=True)
class Place:
    """Where runs go on, as typed."""

    backend: Machines
    workers: str
    address: str | None
    gpus: int | None
    memory: str | None
    time: str | None
    options: list[str]
    no_wait: bool


app = typer.Typer(help="Grids of runs from experiments/*.toml, and their results.", no_args_is_help=True)


@app.command()
def run(
    names: Names,
    profile: ProfileName = "mini",
    seeds: Seeds = None,
    only: Only = None,
    again: Again = False,
    workers: Annotated[str, WorkersHelp] = "1",
    data_root: DataRoot = None,
    plan: Annotated[bool, typer.Option("--plan", help="show what would run, and run nothing")] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="for --plan: two trial rounds of each kind of run give bytes and hours")
    ] = False,
    price: Annotated[float | None, typer.Option(min=0, help="of an hour of one process, for --measure")] = None,
    backend: Backend = Machines.here,
    address: Address = None,
    gpus: Gpus = None,
    memory: Memory = None,
    time: Time = None,
    option: Options = None,
    no_wait: NoWait = False,
    experiments: Directory = EXPERIMENTS,
    results: Results = RESULTS,
    work: WorkFolder = WORK,
) -> None:
    """Run what is missing, first the search. Finished runs are skipped, interrupted ones resumed."""
    from fedlora.cli.experiment_runs import run_missing, show_plan

    project = Project(experiments, results, work, data_root)
    if plan or measure or price is not None:
        show_plan(project, names, profile, seeds, only, measure, price)
        return
    place = Place(backend, workers, address, gpus, memory, time, option or [], no_wait)
    run_missing(project, names, profile, seeds, only, again, place)


@app.command()
def tune(
    names: Names,
    profile: ProfileName = "mini",
    only: Only = None,
    again: Again = False,
    workers: Annotated[str, WorkersHelp] = "1",
    data_root: DataRoot = None,
    backend: Backend = Machines.here,
    address: Address = None,
    gpus: Gpus = None,
    memory: Memory = None,
    time: Time = None,
    option: Options = None,
    no_wait: NoWait = False,
    experiments: Directory = EXPERIMENTS,
    results: Results = RESULTS,
    work: WorkFolder = WORK,
) -> None:
    """The search alone, and what it chooses; `run` does the rest."""
    from fedlora.cli.experiment_runs import run_missing

    place = Place(backend, workers, address, gpus, memory, time, option or [], no_wait)
    run_missing(
        Project(experiments, results, work, data_root), names, profile, None, only, again, place, stages=("search",)
    )


@app.command()
def status(
    names: Names,
    profile: ProfileName = "mini",
    only: Only = None,
    experiments: Directory = EXPERIMENTS,
    results: Results = RESULTS,
    work: WorkFolder = WORK,
    json: AsJson = False,
) -> None:
    """How many runs are finished, failed and still to do, and why they failed."""
    from fedlora.cli.experiment_runs import show_status

    show_status(Project(experiments, results, work), names, profile, only, json)


@app.command()
def table(
    name: Name,
    profile: ProfileName = "mini",
    metric: Annotated[str | None, typer.Option(help='as "test, best" or "rounds to 0.92"')] = None,
    margin: Annotated[
        float | None, typer.Option(help="a difference that does not matter: then each difference gets a verdict")
    ] = None,
    experiments: Directory = EXPERIMENTS,
    results: Results = RESULTS,
    work: WorkFolder = WORK,
    format: FormatOption = Format.table,
    json: JsonAlias = False,
) -> None:
    """The paper's table with our numbers, means over seeds, paired differences with 95 % intervals, costs."""
    from fedlora.cli.experiment_shown import show_table

    show_table(Project(experiments, results, work), name, profile, metric, margin, chosen(format, json))


@app.command()
def plot(
    name: Name,
    out: Annotated[Path | None, typer.Option(help="picture to write (default: results/plots/NAME-PROFILE.png)")] = None,
    profile: ProfileName = "mini",
    experiments: Directory = EXPERIMENTS,
    results: Results = RESULTS,
    work: WorkFolder = WORK,
) -> None:
    """Curves over rounds, differences with intervals, scores by an axis of numbers, or by category."""
    from fedlora.cli.experiment_shown import draw

    draw(Project(experiments, results, work), name, profile, out)
