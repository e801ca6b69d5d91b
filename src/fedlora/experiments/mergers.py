"""Train once, merge many: apply several servers to the same uploads, and controls that could explain their results.

In an experiment with `merged = AXIS`, the labels of that axis are mergers instead of changes to the configuration. Its
runs have one round and keep their uploads; each merger is then a separate server on these uploads, and its model is
measured like the run's. A merger is a method (`name = "glora", rho = 0.25`) or a control
(`merger_settings`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from fedlora.adapters.io import read_adapter
from fedlora.adapters.uploads import read_facts
from fedlora.analysis.audit import mean_update, relative_difference
from fedlora.core.lora import Adapter, LoRA
from fedlora.core.messages import Upload
from fedlora.errors import CheckpointError, counted
from fedlora.experiments.head_alone import head_alone, no_adapter
from fedlora.experiments.merger_settings import ALONE, HEAD, HEADS, LEAST_ERROR, NOTHING, SHRUNK, Merger, method_of
from fedlora.runs.client_data import Dealt
from fedlora.runs.folder import RunFolder
from fedlora.runs.preparation import Prepared
from fedlora.server.server import Server
from fedlora.training.evaluation import ModelEvaluator

_MOST_ALONE = 5
Update = Mapping[str, LoRA]


def merge_all(
    prepared: Prepared, dealt: Dealt, folder: RunFolder, mergers: Mapping[str, Merger], *, validate: bool
) -> dict[str, dict[str, Any]]:
    """Label -> its result: scores on the test set and, with `validate`, on validation; for an update also its Frobenius
    norm over all modules, its relative error against the exact mean, and its largest rank.

    mergers: from `resolved`.
    """
    uploads = _uploads(prepared, folder)
    alike = prepared.server.weighs_by == "uniform"
    weights = {u.client.id: 1.0 if alike else float(u.num_examples) for u in uploads}
    mean = mean_update(uploads, weights)
    sets = {"test": prepared.test, **({"validation": prepared.validation} if validate else {})}
    found: dict[str, dict[str, Any]] = {}
    for label, merger in mergers.items():
        facts: dict[str, Any] = {"merger": dict(merger)}
        control = merger.get("control")
        if control in (HEAD, HEADS):
            apart = weights if control == HEADS else None
            found[label] = facts | head_alone(prepared, dealt, list(sets), apart=apart)
            continue
        models = (
            [u.adapter.modules for u in uploads[:_MOST_ALONE]]
            if control == ALONE
            else [_update(prepared.server, prepared.seed_adapter, uploads, mean, merger)]
        )
        for name, evaluator in sets.items():
            facts[name] = _mean([_measured(evaluator, prepared.seed_adapter, model) for model in models])
        if control != ALONE:
            facts |= {"norm": _norm(models[0]), "rank": max((m.rank for m in models[0].values()), default=0)}
            facts["error"] = relative_difference(models[0], mean) if models[0] else 1.0
        found[label] = facts
    return found


def _uploads(prepared: Prepared, folder: RunFolder) -> list[Upload]:
    """What the clients sent, in the unit in which it travelled, without the heads, which nobody trained."""
    found, played = folder.newest_uploads(), len(folder.metrics())
    if found is None or found.round != played:
        which = "none" if found is None else f"those of round {found.round}"
        raise CheckpointError(
            f"{folder.path} has played {counted(played, 'round')}, and of their uploads {which} are kept: mergers need "
            f"the last round's. Remove the folder, and the run is made again with run.keep_uploads = 'last'."
        )
    clients = {client.id: client for client in prepared.clients}
    uploads = []
    for directory in found.folders:
        adapter, _ = read_adapter(directory, scaling=prepared.config.lora.unit)
        facts = read_facts(directory)
        uploads.append(Upload(clients[facts.client], facts.examples, Adapter(adapter.modules)))
    return uploads


def _update(server: Server, seed: Adapter, uploads: Sequence[Upload], mean: Update, merger: Merger) -> dict[str, LoRA]:
    """The merged update of each module."""
    control = merger.get("control")
    if control == NOTHING:
        return {}
    if control == SHRUNK:
        like = _update(server, seed, uploads, mean, merger["like"])
        shrunk = {}
        for name, lora in mean.items():
            B, A = lora.factors
            size = lora.norm()
            shrunk[name] = LoRA((B * (like[name].norm() / size if size else 0.0)).float(), A.float())
        return shrunk
    if control == LEAST_ERROR:
        merger = {**merger["like"], "basis": "energy"}
    chosen = Server(method_of("", merger), weighting=server.weighs_by, heads="frozen", seed=server.seed)
    state = chosen.aggregate(chosen.init(seed), uploads)
    return dict(chosen.global_update(state))


def _measured(evaluator: ModelEvaluator | None, seed: Adapter, update: Update) -> dict[str, float]:
    if evaluator is None:
        return {}
    scores = evaluator.measure_adapter(replace(no_adapter(seed), base=update))
    return {name: score for name, score in scores.items() if "/" not in name}


def _mean(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: fmean(scores[name] for scores in each) for name in each[0]}


def _norm(update: Update) -> float:
    return math.hypot(*(lora.norm() for lora in update.values())) if update else 0.0
