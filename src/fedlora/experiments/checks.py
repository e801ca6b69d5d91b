"""What is wrong with runs, in one list, before the first is started: settings, files, machine, model, data, disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from fedlora.core.lora import Adapter, LoRA
from fedlora.core.messages import Client
from fedlora.errors import ConfigError, FedLoRAError, counted, said_by
from fedlora.experiments.costs import Workloads
from fedlora.experiments.gpus import dealt
from fedlora.experiments.places import Places
from fedlora.experiments.plan import PlannedRun, told_once
from fedlora.experiments.runnable import check_private_data, missing_files, unfit
from fedlora.runs.checks import check_delta, check_private, of_machine, of_measuring, of_processes
from fedlora.runs.client_data import Dealt
from fedlora.runs.config import RunConfig
from fedlora.runs.inputs import MISSING, with_liars
from fedlora.runs.preparation import target_of
from fedlora.runs.rank_profiles import is_attention
from fedlora.runs.warm_start import warm_start
from fedlora.server.sampling import sample_clients
from fedlora.server.server import Server
from fedlora.training.loop import weigh_classes
from fedlora.training.skeleton import Skeleton

_GB = 1e9


def problems(runs: Sequence[PlannedRun], places: Places, workers: int | None, count: Workloads) -> list[str]:
    """A line for each thing that stands in the way of these runs, with the first run that it stops.

    workers: processes, each with one run; None: on other machines, whose GPUs, memory and programs are not known here.
    count: has read the data and the models that it has counted.
    """
    looked: set[str] = set()
    stopped: dict[str, list[str]] = {}  # the reason -> runs
    for run in runs:
        key = run.config.model_dump_json(exclude={"run": {"seed"}, "train": {"lr"}})
        if key not in looked:
            looked.add(key)
            for why in _of_run(run, count, workers):
                stopped.setdefault(why.strip().splitlines()[0], []).append(run.label)
    shared = [] if workers in (None, 1) else said_by(lambda: dealt(workers or 1, runs))
    return [*missing_files(runs), *told_once(stopped), *shared, *_of_disk(runs, places, count)]


def _of_run(run: PlannedRun, count: Workloads, workers: int | None) -> Iterator[str]:
    """Whatever can be said of settings, files, machine, data and model, each without what it needs of the others."""
    config = run.config
    missing = tuple(key for key, what in run.files.items() if what == MISSING)  # `missing_files` names them
    read = "" if any(key.startswith("data.") for key in missing) else count.data(config)
    bare = "" if "model.path" in missing else count.model(config)
    hub = config.data.task not in (None, "superni") and count.root is None  # its data are not looked for
    yield from (why for why in ("" if hub and isinstance(read, str) else read, bare) if isinstance(why, str) and why)
    if (misfit := unfit(config)) is not None:
        yield misfit
    yield from said_by(lambda: check_private_data(run))
    if misfit is None:
        yield from said_by(lambda: check_private(config, _server(config)))
    if "model.path" not in missing:
        yield from count.no_weights(config)
    if workers is not None:
        yield from of_machine(config)
    if not isinstance(read, str):
        yield from _of_data(config, read, bare, count, fits=misfit is None and "model.adapter" not in missing)


def _of_data(config: RunConfig, data: Dealt, bare: Skeleton | str, count: Workloads, *, fits: bool) -> Iterator[str]:
    """fits: whether the settings alone fit."""
    yield from of_measuring(config, data)
    a_round = len(sample_clients(list(data.sizes), config.run.participation, seed=0, round=0))
    yield from of_processes(config, config.run.processes(config.model.chosen_device(), a_round))
    classes = () if config.train.command is not None else tuple(data.parts.values())
    yield from said_by(
        lambda: check_delta(config, len(data.sizes)),
        lambda: with_liars(config, data),
        lambda: [weigh_classes(part, config.train.class_weights) for part in classes],
    )
    if isinstance(bare, str):
        return
    yield from said_by(lambda: count.check_texts(config, data, bare))
    if fits:
        try:
            yield from _misfits(config, bare, data.sizes, data.classes)
        except FedLoRAError as error:
            yield str(error)


def _server(config: RunConfig) -> Server:
    return config.server.build(config.method.build(), config.run.seed, config.defence.build())


def _fresh(shapes: Mapping[str, tuple[int, int]], rank: int) -> dict[str, LoRA]:
    return {name: LoRA(torch.zeros(d_out, rank), torch.ones(rank, d_in)) for name, (d_out, d_in) in shapes.items()}


def _misfits(config: RunConfig, bare: Skeleton, sizes: Mapping[str, int], classes: Sequence[str]) -> list[str]:
    """What `prepare` would say, on one module of each shape and kind."""
    each = {(is_attention(name), shape): name for name, shape in bare.shapes.modules.items()}
    types = config.clients.assigned(list(sizes), config.run.seed)
    largest = max(max(kind.attention, kind.feed_forward) for kind in types.values())
    pairs = _fresh({name: shape for (_, shape), name in each.items()}, largest)
    adapter = Adapter(pairs, {name: torch.zeros(shape) for name, shape in bare.shapes.heads.items()})
    if config.model.adapter is not None:
        begun = warm_start(config, replace(adapter, modules=_fresh(bare.shapes.modules, largest)), classes)
        adapter = replace(adapter, modules={name: begun.modules[name] for name in pairs})
    clients = [Client(name, kind.ranks(pairs)) for name, kind in types.items()]
    return target_of(config, _server(config), adapter, clients, sizes)[1]


def _of_disk(runs: Sequence[PlannedRun], places: Places, count: Workloads) -> Iterator[str]:
    """Checkpoints, adapters and uploads of all runs, at most: an adapter of the largest rank for each client."""
    needed = 0
    for run in runs:
        read, bare = count.data(run.config), count.model(run.config)
        if isinstance(read, str) or isinstance(bare, str):
            continue
        try:
            kinds = run.config.clients.assigned(list(read.sizes), run.config.run.seed).values()
        except ConfigError:  # of another number of clients
            continue
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
