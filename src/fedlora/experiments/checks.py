"""What is wrong with runs, in one list, before the first is started: settings, files, model, data, memory, disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from fedlora.core.lora import Adapter, LoRA
from fedlora.core.messages import Client
from fedlora.data.demo import model_location
from fedlora.errors import ConfigError, FedLoRAError, counted
from fedlora.experiments.costs import Workloads, memory_of
from fedlora.experiments.gpus import visible
from fedlora.experiments.places import Places
from fedlora.experiments.plan import PlannedRun
from fedlora.experiments.runnable import missing_files, unfit_runs
from fedlora.given_files import half_the_memory
from fedlora.runs.checks import check_measuring, check_processes, check_task
from fedlora.runs.config import RunConfig
from fedlora.runs.preparation import checked_target
from fedlora.runs.rank_profiles import is_attention
from fedlora.runs.warm_start import warm_start
from fedlora.training.content import check_weights
from fedlora.training.loading import SPREAD
from fedlora.training.skeleton import Skeleton

_GB = 1e9


def problems(runs: Sequence[PlannedRun], places: Places, workers: int | None, count: Workloads) -> list[str]:
    """A line for each thing that stands in the way of these runs; each is looked at once, on its first seed.

    workers: processes, each with one run; None: on other machines, whose GPUs and memory are not known here. count: has
    read the data and the models that it has counted.
    """
    found = [*unfit_runs(runs), *missing_files(runs)]
    if found:
        return found
    found = [*_of_models(runs, workers), *_of_runs(runs, count, workers)]
    return list(dict.fromkeys([*found, *_of_disk(runs, places, count)]))


def _of_models(runs: Sequence[PlannedRun], workers: int | None) -> Iterator[str]:
    """Weights that are not here, and devices that this machine lacks."""
    for path, revision in sorted({(run.config.model.path, run.config.model.revision or "") for run in runs}):
        try:
            check_weights(model_location(path), revision or None)
        except FedLoRAError as error:
            yield f"model.path = {path!r}: {error}"
    for device in {run.config.model.chosen_device() for run in runs} if workers else ():
        try:
            torch.zeros((), device="cuda" if device == SPREAD else device).item()
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            yield f"model.device = {device!r} cannot be used here: {str(error).splitlines()[0]}"


def _of_runs(runs: Sequence[PlannedRun], count: Workloads, workers: int | None) -> Iterator[str]:
    """Data that cannot be read, models that LoRA does not fit, settings that do not fit these, too little memory."""
    looked: set[str] = set()
    for run in runs:
        key = run.config.model_dump_json(exclude={"run": {"seed"}, "train": {"lr"}})
        if key in looked:
            continue
        looked.add(key)
        read, bare = count.data(run.config), count.model(run.config)
        yield from (why for why in (read, bare) if isinstance(why, str))  # of all runs that share them
        if isinstance(read, str) or isinstance(bare, str):
            continue
        try:
            check_task(run.config)
            check_measuring(run.config, read.dealt)
            check_processes(run.config, run.config.run.processes(run.config.model.chosen_device(), len(read.sizes)))
            _check_fit(run.config, bare, read.sizes, read.classes)
        except FedLoRAError as error:
            yield f"{run.label}: {error}"
            continue
        if workers is not None:
            with suppress(ConfigError):  # of a model that cannot tell
                yield from _of_memory(run, bare, list(read.sizes), workers)


def _fresh(shapes: Mapping[str, tuple[int, int]], rank: int) -> dict[str, LoRA]:
    return {name: LoRA(torch.zeros(d_out, rank), torch.ones(rank, d_in)) for name, (d_out, d_in) in shapes.items()}


def _check_fit(config: RunConfig, bare: Skeleton, sizes: Mapping[str, int], classes: Sequence[str]) -> None:
    """Raises what `prepare` would, on one module of each shape and kind."""
    each = {(is_attention(name), shape): name for name, shape in bare.shapes.modules.items()}
    types = config.clients.assigned(list(sizes), config.run.seed)
    largest = max(max(kind.attention, kind.feed_forward) for kind in types.values())
    pairs = _fresh({name: shape for (_, shape), name in each.items()}, largest)
    adapter = Adapter(pairs, {name: torch.zeros(shape) for name, shape in bare.shapes.heads.items()})
    if config.model.adapter is not None:
        begun = warm_start(config, replace(adapter, modules=_fresh(bare.shapes.modules, largest)), classes)
        adapter = replace(adapter, modules={name: begun.modules[name] for name in pairs})
    clients = [Client(name, kind.ranks(pairs)) for name, kind in types.items()]
    server = config.server.build(config.method.build(), config.run.seed, config.defence.build())
    checked_target(config, server, adapter, clients, sizes)


def _of_memory(run: PlannedRun, bare: Skeleton, names: Sequence[str], workers: int) -> Iterator[str]:
    config, device = run.config, run.config.model.chosen_device()
    memory = memory_of(config, bare, names)
    there: float = 2 * half_the_memory()
    if device != "cpu" and not visible():
        return  # `_of_models` says that the device is not there
    if device == SPREAD or device.startswith("cuda"):
        each = [torch.cuda.mem_get_info(number)[1] for number in range(len(visible()))]
        there = sum(each) if device == SPREAD or workers > 1 else torch.cuda.mem_get_info(device)[1]
    if memory.total * workers > there:
        yield (
            f"{run.label}: training takes about {memory.total / _GB:.1f} GB (weights {memory.weights / _GB:.1f}, "
            f"adapters with optimiser {memory.adapters / _GB:.1f}, activations {memory.activations / _GB:.1f}) in "
            f"each of {counted(workers, 'process', 'processes')}, and {device} has {there / _GB:.1f} GB. Take fewer "
            f"--workers, a larger train.accumulation, model.checkpointing, or model.dtype = 'bfloat16'."
        )


def _of_disk(runs: Sequence[PlannedRun], places: Places, count: Workloads) -> Iterator[str]:
    """Checkpoints, adapters and uploads of all runs, at most: an adapter of the largest rank for each client."""
    needed = 0
    for run in runs:
        read, bare = count.data(run.config), count.model(run.config)
        if isinstance(read, str) or isinstance(bare, str):
            return
        kinds = run.config.clients.assigned(list(read.sizes), run.config.run.seed).values()
        rank = max(max(kind.attention, kind.feed_forward) for kind in kinds)
        one = 4 * (rank * sum(map(sum, bare.shapes.modules.values())) + bare.shapes.head_numbers)
        kept = run.config.run
        uploads = {"none": 0, "last": 1, "all": kept.rounds}[kept.keep_uploads]
        needed += one * (kept.keep_checkpoints + 3 + uploads * len(kinds))
    place = places.work.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        yield (
            f"the folders of {counted(len(runs), 'run')} take about {needed / _GB:.1f} GB, and the disk of {place} has "
            f"{free / _GB:.1f} GB left. Name another --work, or lower run.keep_checkpoints."
        )
