"""`fedlora experiment sbatch`, and `fedlora experiment run --on ray`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from fedlora.cli.batches import Cluster, worker_count
from fedlora.cli.experiment import Machines
from fedlora.cli.experiment_project import Project
from fedlora.cli.experiment_runs import chosen
from fedlora.cli.screen import notes
from fedlora.core import files
from fedlora.errors import ConfigError, counted
from fedlora.experiments.grid import Grid
from fedlora.experiments.ray_tasks import ray_tasks
from fedlora.experiments.slurm import array_script, cores_of


def cluster(on: Machines, address: str | None, gpus: int | None, memory: str | None, workers: str) -> Cluster | None:
    """Where `--on` runs; None: here. Raises `ConfigError` for options of the other place."""
    if on == Machines.here:
        if given := [name for name, value in {"address": address, "gpus": gpus, "memory": memory}.items() if value]:
            raise ConfigError(f"--{given[0]} is for --on ray; on this machine, CUDA_VISIBLE_DEVICES names its GPUs.")
        return None
    if workers != "1":
        raise ConfigError("--workers are processes of this machine; Ray runs as many as it has room for: leave it out.")
    return partial(ray_tasks, address=address, gpus=gpus, memory=memory)


def write_script(
    project: Project, names: Sequence[str], profile: str, seeds: str | None, only: str | None, workers: str,
    shards: int, time: str, gpus: int, memory: str | None, options: Sequence[str], out: Path | None,
) -> None:  # fmt: skip
    """Write an array script for Slurm; `fedlora experiment sbatch --help` explains each argument."""
    if workers == "auto":
        raise ConfigError("--workers auto counts this machine's cores, and Slurm runs elsewhere: give a number.")
    if wrong := [option for option in options if not option.startswith("--") or len(option.split()) > 1]:
        raise ConfigError(f"--option takes one option of sbatch, such as --partition=gpu; got {wrong[0]!r}.")
    loaded = chosen(project, names, profile, seeds, only)
    grids = [Grid(experiment, profile) for experiment in loaded]
    search = [run for grid in grids for run in grid.searches]
    runs = [run for grid in grids for run in [*grid.runs, *grid.waiting]] + search
    place = project.work / "slurm"
    name = "-".join([*(experiment.name for experiment in loaded), profile])
    file = (out or place / f"{name}.sh").resolve()
    place.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "fedlora", "experiment", "run", *names, "--profile", profile, "--workers", workers]
    told = {
        "--seeds": seeds, "--only": only, "--data-root": project.data_root, "--experiments": project.experiments,
        "--results": project.results, "--work": project.work,
    }  # fmt: skip
    words += [word for key, value in told.items() if value is not None for word in (key, str(value))]
    cores = worker_count(workers, runs) * max(cores_of(run.config) for run in runs)
    asked = {
        "job-name": name, "time": time, "cpus-per-task": str(cores), "chdir": str(Path.cwd()),
        "output": str((place / f"{name}-%A_%a.log").resolve()),
        **({"gpus-per-task": str(gpus), "ntasks": "1"} if gpus else {}), **({"mem": memory} if memory else {}),
    }  # fmt: skip
    files.write(file, array_script(file, words, shards, asked, options, search=bool(search)))
    waves = "the search, then the runs that it decides" if search else "all runs"
    notes.print(f"{file}: {counted(shards, 'task')} for {waves}. Submit it by: bash {file}")
