"""A configuration made real: the data read and dealt out, the model loaded, the server and its clients put together."""

from __future__ import annotations

import importlib
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedlora.client import Client
from fedlora.config import RunConfig
from fedlora.data import TextData, demo_model, label_counts, smollm2_model
from fedlora.dealing import Dealt, deal
from fedlora.errors import ConfigError, HyperparameterError
from fedlora.evaluation import ModelEvaluator, Target
from fedlora.lora import Adapter, LoRA
from fedlora.method import Method
from fedlora.methods import METHODS, build
from fedlora.models import AdaptedModel, LoRASettings, model_digests
from fedlora.peft_io import AdapterSpec
from fedlora.ranks import RankType, assign_types, is_attention
from fedlora.rounds import sample_clients
from fedlora.server import Server, ServerState
from fedlora.simulation import Trainer
from fedlora.sketch_round import Sketch, SketchedRound
from fedlora.together import GroupTrainer
from fedlora.training import LocalTrainer, TrainSettings


@dataclass(frozen=True, eq=False)
class Prepared:
    """All parts of a run, loaded and checked.

    parts: client -> its training data. test: on the test data; probes: further test sets by name ("unseen",
    "validation_mismatched"), measured at the end only.
    """

    config: RunConfig
    server: Server
    clients: tuple[Client, ...]
    parts: Mapping[str, TextData]
    trainer: Trainer
    validation: ModelEvaluator | None
    test: ModelEvaluator | None
    probes: Mapping[str, ModelEvaluator]
    target: Target
    metric: str
    seed_adapter: Adapter
    spec: AdapterSpec
    manifest: Mapping[str, Any]


def prepare(config: RunConfig, data_root: Path | None = None) -> Prepared:
    """Read the data, deal it out, load the model. Nothing is written.

    Args:
        data_root: where the files of `data.task` are. Not part of the configuration: it says where, not what.

    Raises:
        ConfigError, DataError, HyperparameterError: what cannot be run as written.
    """
    server = server_of(config)
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    data = deal(config, data_root)
    parts = data.parts
    types = _types(config, list(parts))
    labels = next(iter(parts.values())).label_names
    model = _model(config, labels)
    largest = max(max(kind.attention, kind.feed_forward) for kind in types.values())
    seed_adapter, spec = model.seed_adapter(largest, seed=config.run.seed)
    clients = tuple(Client(name, kind.ranks(seed_adapter.modules)) for name, kind in types.items())
    seed_adapter = _cut(seed_adapter, clients)
    initial = server.init(seed_adapter)
    for client in clients:  # a method that cannot serve these ranks says so now, not after the first round
        server.download(initial, client)
    target = config.evaluate.target
    if target == "auto":
        target = "server" if server.has_global_model(initial) else "clients"
    _check_fit(config, server, initial, target, len(clients))
    settings = TrainSettings(
        **config.train.model_dump(),
        rounds=config.run.rounds,
        max_length=config.data.max_length,
        loss_on=config.data.loss_on,
        bf16=config.model.bf16,
    )
    e = config.evaluate

    def evaluator(sets: Mapping[str, TextData], target: Target, own: Mapping[str, TextData]) -> ModelEvaluator | None:
        if not any(len(part) for part in sets.values()):
            return None
        return ModelEvaluator(
            model, sets, clients, target=target, metric=e.metric, own=own, max_length=config.data.max_length,
            max_new_tokens=e.max_new_tokens, batch_size=e.batch_size, bf16=config.model.bf16,
        )  # fmt: skip

    probes = {name: evaluator(sets, target, {}) for name, sets in data.probes.items()}

    return Prepared(
        config=config,
        server=server,
        clients=clients,
        parts=parts,
        trainer=(GroupTrainer if settings.together > 1 else LocalTrainer)(model, parts, settings, seed=config.run.seed),
        validation=evaluator(data.validation, target, data.own_validation),
        test=evaluator(data.test, target, data.own_test),
        probes={name: probe for name, probe in probes.items() if probe is not None},
        target=target,
        metric=e.metric.replace("-", "_"),
        seed_adapter=seed_adapter,
        spec=spec,
        manifest=_manifest(config, data, clients, model) | {"evaluation_target": target},
    )


def _check_fit(config: RunConfig, server: Server, initial: ServerState, target: Target, clients: int) -> None:
    """Raises `ConfigError` for options that can never work with this method or these clients."""
    name, roles = server.method.name, server.roles(initial)
    if config.evaluate.metric != "accuracy":
        if config.model.task != "causal-lm":
            raise ConfigError(
                f"evaluate.metric = {config.evaluate.metric!r} is of generated text; the task classifies."
            )
        if config.evaluate.metric == "rouge-l" and config.evaluate.max_new_tokens >= config.data.max_length:
            raise ConfigError(
                f"evaluate.max_new_tokens = {config.evaluate.max_new_tokens} leaves no room for a prompt within "
                f"data.max_length = {config.data.max_length}."
            )
    if config.server.gauge_stress is not None and (roles.B, roles.A) != ("shared", "shared"):
        raise ConfigError(f"server.gauge_stress needs both factors shared, and {name} shares {roles}.")
    if target == "server" and not server.has_global_model(initial):
        raise ConfigError(
            f"{name} keeps no global model to evaluate; set evaluate.target = 'clients' (or leave it out)."
        )
    if config.server.upload == "subspace" and (roles.B, roles.A) != ("shared", "shared"):
        raise ConfigError(f"server.upload = 'subspace' needs both factors shared, and {name} shares {roles}.")
    if config.run.keep_uploads != "none" and "local" in (roles.B, roles.A):
        raise ConfigError(f"run.keep_uploads cannot store what never leaves a client, and {name} shares {roles}.")
    drops = (
        "server.memory" if server.memory is not None else "server.sketch_rank" if config.server.sketch_rank else None
    )
    if config.run.keep_uploads != "none" and drops:
        raise ConfigError(f"run.keep_uploads stores a round's uploads, and {drops} keeps none of them.")
    if config.server.sketch_rank:
        SketchedRound(server, initial, Sketch(config.server.sketch_rank))
    server.open(initial)  # says so if its memory is too small
    a_round = len(sample_clients([str(k) for k in range(clients)], config.run.participation, seed=0, round=0))
    if server.quorum is not None and server.quorum > a_round:
        raise ConfigError(
            f"server.quorum = {server.quorum} can never be met: {a_round} of {clients} clients take part in a round."
        )


def server_of(config: RunConfig) -> Server:
    """The server that a configuration describes."""
    method = make_method(config.method.name, config.method.preset, **(config.method.model_extra or {}))
    s = config.server
    return Server(
        method, weighting=s.weighting, heads=s.heads, quorum=s.quorum, missing=s.missing, memory=s.memory,
        workers=s.workers, seed=config.run.seed,
    )  # fmt: skip


def make_method(name: str, preset: str | None = None, **hparams: Any) -> Method[Any]:
    """A method by its name, or of a user's own class as "module:Class"."""
    if name in METHODS or ":" not in name:
        return build(name, preset=preset, **hparams)
    if preset is not None:
        raise HyperparameterError(f"presets are of the built-in methods; {name!r} has no preset {preset!r}.")
    module, _, cls = name.partition(":")
    try:
        method: Method[Any] = getattr(importlib.import_module(module), cls)(**hparams)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise HyperparameterError(f"the method {name!r} cannot be made: {error}.") from error
    lacks = [
        part for part in ("State", "init", "roles", "aggregate", "readout", "effective") if not hasattr(method, part)
    ]
    if lacks:
        raise HyperparameterError(f"{name!r} is no method: it has no {', '.join(lacks)} (see fedlora.method.Method).")
    return method


def _types(config: RunConfig, names: list[str]) -> dict[str, RankType]:
    """Client -> its ranks, in the order of the names."""
    c, types = config.clients, config.clients.types()
    if c.profile is not None:
        assigned = assign_types(names, types, c.profile, seed=config.run.seed)
        return {name: assigned[name] for name in names}
    if len(types) == 1:
        return dict.fromkeys(names, types[0])
    if len(types) == len(names):
        return dict(zip(names, types, strict=True))
    raise ConfigError(
        f"clients.ranks has {len(types)} entries for {len(names)} clients. Give one for each, or a single one, "
        f"or name a clients.profile that distributes them."
    )


def _cut(seed_adapter: Adapter, clients: Sequence[Client]) -> Adapter:
    """The common start at the largest rank that any client has of each module."""
    ranks = [client.ranks(seed_adapter.modules) for client in clients]
    modules = {}
    for name, lora in seed_adapter.modules.items():
        B, A = lora.factors
        largest = max(r[name] for r in ranks)
        modules[name] = LoRA(B[:, :largest].clone(), A[:largest].clone())
    return Adapter(modules, seed_adapter.heads)


def _model(config: RunConfig, labels: tuple[str, ...]) -> AdaptedModel:
    m, lo = config.model, config.lora
    device = ("cuda" if torch.cuda.is_available() else "cpu") if m.device == "auto" else m.device
    return AdaptedModel.load(
        _model_path(config),
        m.task,
        LoRASettings(lo.targets, lo.scaling, lo.dropout, lo.saved),
        labels=labels,
        seed=config.run.seed,
        device=device,
        dropout=m.dropout,
        four_bit=m.four_bit,
        checkpointing=m.checkpointing,
    )


def _model_path(config: RunConfig) -> Path | str:
    """Where the model is; "demo" and "smollm2" name files of installed packages, and a hub id stays as it is."""
    packaged = {"demo": demo_model, "smollm2": smollm2_model}
    path = config.model.path
    return packaged[path]() if path in packaged else path


def _manifest(
    config: RunConfig,
    data: Dealt,
    clients: tuple[Client, ...],
    model: AdaptedModel,
) -> dict[str, Any]:
    path, parts = _model_path(config), data.parts
    first = next(iter(parts.values()))
    counts = label_counts([y for p in parts.values() for y in p.labels or ()], _ranges(parts)) if first.labels else None
    return {
        "config_digest": config.digest(),
        "versions": {name: _version(name) for name in ("fedlora", "torch", "transformers", "peft", "numpy")},
        "python": platform.python_version(),
        "commit": _commit(),
        "device": str(model.device),
        "threads": torch.get_num_threads(),
        "seed": config.run.seed,
        "model": {"path": config.model.path, "sha256": model_digests(path)},
        "data": {
            "train": {c: _facts(p) for c, p in parts.items()},
            "validation": _facts(TextData.concat(list(data.validation.values()))),
            "test": _facts(TextData.concat(list(data.test.values()))),
            "probes": {name: _facts(TextData.concat(list(sets.values()))) for name, sets in data.probes.items()},
            "categories": dict(data.categories),
            "labels": list(first.label_names),
            "label_counts": dict(zip(parts, counts.tolist(), strict=True)) if counts is not None else None,
        },
        "clients": {c.id: _shown_rank(c) for c in clients},
        "method": repr(make_method(config.method.name, config.method.preset, **(config.method.model_extra or {}))),
    }


def _facts(data: TextData) -> dict[str, Any]:
    return {"examples": len(data), "sha256": data.digest()}


def _shown_rank(client: Client) -> int | str:
    """Its rank, or its ranks as "30/200"."""
    if isinstance(client.rank, int):
        return client.rank
    in_order = sorted(client.rank, key=lambda name: not is_attention(name))
    shown = list(dict.fromkeys(client.rank[name] for name in in_order))
    return shown[0] if len(shown) == 1 else "/".join(map(str, shown))


def _ranges(parts: Mapping[str, TextData]) -> list[NDArray[np.int64]]:
    """Where each client's examples stand in all of them laid end to end."""
    ends = np.cumsum([len(p) for p in parts.values()])
    return [np.arange(end - len(p), end) for end, p in zip(ends, parts.values(), strict=True)]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> dict[str, Any] | None:
    """The commit of the checkout that this code runs from, and whether it is clean; None outside one."""
    here = Path(__file__).parent

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here), *args], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return {"id": git("rev-parse", "HEAD"), "clean": not git("status", "--porcelain", "--untracked-files=no")}
    except (OSError, subprocess.CalledProcessError):
        return None
