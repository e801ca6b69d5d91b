"""Checks of runs before they start: what cannot be run, and which results are from other data or other code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from fedlora.core.lora import Adapter, LoRA
from fedlora.core.messages import Client
from fedlora.errors import ConfigError, FedLoRAError, counted
from fedlora.experiments.grid import Grid
from fedlora.experiments.plan import PlannedRun
from fedlora.experiments.result import Result
from fedlora.experiments.scores import parse_number
from fedlora.runs.config import RunConfig
from fedlora.runs.inputs import MISSING, named, own_paths


def check_number(grid: Grid) -> None:
    """Raises `ConfigError`, before anything is run, for a compared number (`Result.score`) that is unknown, or that no
    run of the profile can have."""
    number, whys = parse_number(which := grid.which()), []
    for cell in grid.cells:
        if (why := number.lacks(grid.first(cell).config)) is None:
            return
        whys.append(why)
    if whys:
        raise ConfigError(f"no run can have the number {which!r}: {whys[0]}.")


def check_private_data(run: PlannedRun) -> None:
    """Raises `ConfigError` for a private run on your own data files."""
    if run.config.privacy is not None and any(key.startswith("data.") for key in run.files):
        raise ConfigError(
            "an experiment's results name data files by their digests, which say something about every client in "
            "them, and [privacy] promises otherwise: use fedlora run, or data that everybody has (data.task)."
        )


def unfit(config: RunConfig) -> str | None:
    """Why the configuration alone shows that it cannot be run, with any seed; None if it does not."""
    try:
        server = config.server.build(config.method.build(), config.run.seed, config.defence.build())
        names = [str(k) for k in range(clients_of(config))]
        assigned = config.clients.assigned(names, config.run.seed) if names else {}
        ranks = {of.attention for of in assigned.values()}
        if ranks:  # a model of one square matrix shows whether the method serves them
            size = max(ranks)
            state = server.init(Adapter({"any": LoRA(torch.zeros(size, size), torch.eye(size))}))
            for rank in sorted(ranks):
                server.download(state, Client("one of them", rank))
    except FedLoRAError as error:
        return str(error)
    return None


def clients_of(config: RunConfig) -> int:
    """The number of clients: the files of data.clients, the tasks of superni, or what the configuration tells."""
    data = config.data
    if data.clients:
        return len(data.clients)
    if data.task == "superni":
        return data.tasks
    return config.clients.how_many


def missing_files(runs: Sequence[PlannedRun]) -> list[str]:
    """A line for each missing file or folder."""
    found = {key: own_paths(run.config)[key] for run in runs for key, what in run.files.items() if what == MISSING}
    return [
        f"{key}: {path} does not exist, and runs are known by its content. Relative paths start at the folder of the "
        f"experiment's file."
        for key, path in found.items()
    ]


def other_files(runs: Sequence[PlannedRun], results: Mapping[str, Result]) -> list[str]:
    """A line for each data set or model for which there are results with other content, under the same name in the same
    configuration; and for each that is missing now."""
    wanted = {named(run.config).digest(): run for run in runs if run.files and run.digest not in results}
    found: Counter[tuple[str, str, str, str]] = Counter()
    for result in results.values() if wanted else ():
        run = wanted.get(result.settings.digest()) if result.files else None
        if run is None:
            continue
        for key, here in run.files.items():
            if result.files.get(key) != here != MISSING:
                found[key, own_paths(run.config)[key], result.files.get(key, ""), here] += 1
    return missing_files(list(wanted.values())) + [
        f"{key}: {counted(count, 'finished run')} of the same configuration had a {Path(path).name} with SHA-256 "
        f"{there[:12]}, and {path} has {here[:12]}: another content, and they are not taken."
        for (key, path, there, here), count in found.items()
    ]
