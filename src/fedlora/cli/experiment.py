"""`fedlora experiment`: grids of runs, and their results. This file holds the commands' texts and options, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedlora.cli.formats import Format, FormatOption
from fedlora.cli.options import AsJson, DataRoot, Margin, Workers, refuse_idle


class Machines(StrEnum):
    """Where runs go on."""

    here = "here"
    slurm = "slurm"
    ray = "ray"


Name = Annotated[str, typer.Argument(help="the NAME of experiments/NAME.toml, or a path", show_default=False)]
Names = Annotated[
    list[str], typer.Argument(help="each the NAME of experiments/NAME.toml, or a path", show_default=False)
]
ProfileName = Annotated[str, typer.Option("--profile", help="a profile of the file: mini, paper or another")]
Results = Annotated[Path, typer.Option("--results", help="where results are kept")]
WorkFolder = Annotated[Path, typer.Option("--work-dir", help="where run folders and failures go")]
Only = Annotated[
    str | None, typer.Option("--filter", help='only these labels of axes: "task=SST-2,method=GLoRA,method=FedIT"')
]
RESULTS, WORK = Path("results"), Path("runs/experiments")


# Option -> the machines that it is for.
_FOR = {"workers": "here", "gpus": "slurm or ray", **dict.fromkeys(("time", "option"), "slurm")}


@dataclass(frozen=True)
class Place:
    """Where runs go on, as typed."""

    backend: Machines
    workers: str
    gpus: int | None
    time: str | None
    options: list[str]


app = typer.Typer(help="Grids of runs from experiments/*.toml, and their results.", no_args_is_help=True)


@app.command("tune", help="The search alone, and what it chooses; `run` does the rest.")
@app.command("run")
def run(
    context: typer.Context,
    names: Names,
    profile: ProfileName = "mini",
    seeds: Annotated[str | None, typer.Option(help="only these seeds: 0:8 (eight of them), 0,3,5 or 7")] = None,
    only: Only = None,
    again: Annotated[bool, typer.Option("--force", help="first forget failures, and try these runs again")] = False,
    workers: Workers = "1",
    data_root: DataRoot = None,
    plan: Annotated[bool, typer.Option("--plan", help="show what would run, and run nothing")] = False,
    measure: Annotated[bool, typer.Option("--measure", help="the plan, with bytes and hours of trial runs")] = False,
    price: Annotated[float | None, typer.Option(min=0, help="of an hour of a process, for --measure")] = None,
    backend: Annotated[
        Machines, typer.Option(help="this machine, array jobs of Slurm, the Ray cluster here")
    ] = Machines.here,
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs of a run on Slurm or Ray")] = None,
    time: Annotated[str | None, typer.Option(help="the time limit of a run on Slurm: 04:00:00")] = None,
    option: Annotated[list[str] | None, typer.Option(help="a further option of sbatch: --mem=16G")] = None,
    results: Results = RESULTS,
    work: WorkFolder = WORK,
) -> None:
    """Run what is missing, first the search. Finished runs are skipped, interrupted ones resumed."""
    search = context.info_name == "tune"
    refuse_idle(
        context,
        dict.fromkeys(("seeds", "plan", "measure", "price") if search else (), "is of `fedlora experiment run`"),
    )
    refuse_idle(context, {name: f"is for --backend {of}" for name, of in _FOR.items() if backend not in of.split()})
    from fedlora.cli.experiment_runs import grids, run_missing, show_plan

    found = grids(names, profile, only, seeds)
    if plan or measure or price is not None:
        show_plan(found, results, data_root, measure=measure or price is not None, price=price)
    else:
        place = Place(backend, workers, gpus, time, option or [])
        run_missing(
            found, results, work, data_root, place, again=again, stages=("search",) if search else ("search", "run")
        )


@app.command()
def status(
    names: Names, profile: ProfileName = "mini", only: Only = None, results: Results = RESULTS, work: WorkFolder = WORK,
    json: AsJson = False,
) -> None:  # fmt: skip
    """How many runs are finished, failed and still to do, and why they failed."""
    from fedlora.cli.experiment_runs import grids, show_status

    show_status(grids(names, profile, only), results, work, json)


@app.command()
def table(
    name: Name,
    profile: ProfileName = "mini",
    metric: Annotated[str | None, typer.Option(help='as "test, best" or "rounds to 0.92"')] = None,
    margin: Margin = None,
    results: Results = RESULTS,
    format: FormatOption = Format.table,
) -> None:
    """The paper's table with our numbers, means over seeds, paired differences with 95 % intervals, costs."""
    from fedlora.cli.experiment_runs import grids, show_table

    show_table(grids([name], profile)[0], results, metric, margin, format)


@app.command()
def plot(
    name: Name,
    out: Annotated[Path | None, typer.Option(help="picture to write (default: results/plots/NAME-PROFILE.png)")] = None,
    profile: ProfileName = "mini",
    results: Results = RESULTS,
) -> None:
    """Curves over rounds, differences with intervals, scores by an axis of numbers, or by category."""
    from fedlora.cli.experiment_runs import draw, grids

    draw(grids([name], profile)[0], results, out)


@app.command()
def ranks(
    profile: Annotated[list[str] | None, typer.Argument(help="names of profiles (default: all)")] = None,
    ranks: Annotated[str, typer.Option(help="ranks to distribute, separated by commas")] = "4,8,16,32,64",
    clients: Annotated[int, typer.Option(min=1, help="number of clients")] = 50,
    participation: Annotated[float, typer.Option(min=0.0, max=1.0, help="share of clients in a round")] = 0.5,
    json: AsJson = False,
) -> None:
    """Show how many clients of which rank a profile (clients.profile) makes."""
    from fedlora.cli.methods import show_ranks

    show_ranks(profile or (), ranks, clients, participation, json)
