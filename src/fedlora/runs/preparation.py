"""Turns a configuration into a run: reads and distributes data, loads the model, builds server and clients."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedlora.adapters.writer import AdapterSpec
from fedlora.attacks import Adversary
from fedlora.core.lora import Adapter, LoRA
from fedlora.core.messages import Client
from fedlora.core.trainer import OneByOne, Workers
from fedlora.data import TextData
from fedlora.errors import FedLoRAError, refuse
from fedlora.runs.attack_section import attack_facts, with_flipped_labels
from fedlora.runs.checks import built, of_data, of_settings, on_a_toy, per_round, planned_privacy
from fedlora.runs.client_data import Dealt, Keep, deal, training_rows
from fedlora.runs.config import RunConfig
from fedlora.runs.exported import base_name, named
from fedlora.runs.identity import own_files
from fedlora.runs.manifest import manifest, straddling
from fedlora.runs.private_releases import public_manifest
from fedlora.runs.samples import drawn_samples
from fedlora.runs.warm_start import warm_start
from fedlora.server.server import Server
from fedlora.training.encode import Cut
from fedlora.training.loop import LocalTrainer
from fedlora.training.measure import ModelEvaluator, Target
from fedlora.training.metrics import score_name
from fedlora.training.models import AdaptedModel
from fedlora.training.programs import ProgramTrainer
from fedlora.training.settings import TrainSettings
from fedlora.training.templates import find_template

log = logging.getLogger("fedlora.runs")


@dataclass(frozen=True, eq=False)
class Prepared:
    """All parts of a run, loaded and checked.

    parts: client -> its training data. workers: train the clients, one or several at a time. processes: how many do the
    work, see `crew`. adversary: the byzantine clients, or None. manifest: the run's public record; for a private run,
    facts about clients' data are in `secrets` instead. test: on the test data; probes: further test sets by name
    ("unseen", "validation_mismatched"), measured only at the end. samples: held-out prompts whose answers by a language
    model are kept, before and after.

    Example:
        >>> prepared = prepare(load_config(Path("config.toml")))
        >>> [client.rank for client in prepared.clients], prepared.target
        ([2, 4, 4], 'server')
    """

    config: RunConfig
    server: Server
    clients: tuple[Client, ...]
    parts: Mapping[str, TextData]
    model: AdaptedModel
    trainer: LocalTrainer | ProgramTrainer
    workers: Workers
    processes: int
    adversary: Adversary | None
    validation: ModelEvaluator | None
    test: ModelEvaluator | None
    probes: Mapping[str, ModelEvaluator]
    samples: TextData | None
    target: Target
    metric: str
    seed_adapter: Adapter
    spec: AdapterSpec
    tokenizer: Any
    manifest: Mapping[str, Any]
    secrets: Mapping[str, Any] | None = None

    @property
    def per_round(self) -> int:
        """How many clients take part in a round."""
        return per_round(self.config, list(self.parts))

    def working_in(self, folder: Path) -> Prepared:
        """The same run, with the rounds of its clients' programs in `folder`, if they train by programs."""
        if isinstance(self.trainer, LocalTrainer):
            return self
        trainer = self.trainer.working_in(folder)
        return replace(self, trainer=trainer, workers=OneByOne(trainer))


def prepare(
    config: RunConfig,
    data_root: Path | None = None,
    keep: Keep | None = None,
    programs: Path | None = None,
) -> Prepared:
    """Read the data, deal it out, load the model. Nothing is written.

    Args:
        data_root: where the files of `data.task` are. Not part of the configuration: it says where, not what.
        keep: as `deal` has it. programs: the folder for the rounds of train.command; by default in the run's folder.

    Raises:
        ConfigError, DataError, HyperparameterError: the configuration cannot be run as written.

    Example:
        >>> prepared = prepare(load_config(Path("config.toml")))
        >>> sorted(prepared.parts)
        ['site-1', 'site-2', 'site-3']
    """
    wrong = list(of_settings(config))
    gone = [key for key, path in own_files(config).items() if not path.exists()]
    refuse(wrong if any(key.startswith("data.") for key in gone) else ())
    if threads := config.run.torch_threads():
        torch.set_num_threads(threads)
    try:
        data = deal(config, data_root, keep)
        adversary = config.attack.adversary(list(data.parts), config.run.seed)
        data = replace(data, parts=with_flipped_labels(data.parts, adversary))
    except FedLoRAError as error:  # reported with all that is wrong
        refuse([*wrong, str(error)] if wrong else ())
        raise
    if config.data.task == "mnli" and not data.probes:
        log.warning(
            "data.task = 'mnli' from --data-root has no second test set: put validation_mismatched.jsonl beside "
            "glue/mnli/validation.jsonl, or leave --data-root out."
        )
    parts, labels, names = data.parts, data.classes, list(data.parts)
    processes = config.run.processes(config.model.chosen_device(), per_round(config, names))
    target, misfits = on_a_toy(config, names)
    refuse([*wrong, *of_data(config, data, processes), *misfits])
    server, device = built(config), "cpu" if processes > 1 else None  # processes move copies
    model = config.model.load(config.lora, labels, config.run.seed, device=device)
    clients, seed_adapter, spec = _start(config, model, names, labels)
    if config.model.adapter is not None:  # its rank may be too large for a client, which the toy does not know
        begun = server.init(seed_adapter)
        for client in clients:
            server.download(begun, client)
    if config.privacy is not None:
        server = replace(server, round=planned_privacy(config, config.privacy, clients, seed_adapter))
    trainer = _trainer(config, model, parts, spec, programs)
    measured = _evaluators(config, data, model, clients, target)
    ends = () if config.template is None else find_template(config.template, model.tokenizer).ends
    facts = {
        **manifest(config, data, clients, model, server.method),
        "evaluation_target": target,
        "cut": _cuts(trainer.cut() if isinstance(trainer, LocalTrainer) else {}),
        "copies": straddling(data),
        "answer_ends": list(ends),
        **({"attack": attack_facts(adversary)} if adversary is not None else {}),
        "cut_held_out": {name: cuts for name, each in measured.items() if (cuts := _cuts(each.cut()))},
    }
    return Prepared(
        config=config,
        server=server,
        clients=clients,
        parts=parts,
        model=model,
        trainer=trainer,
        workers=OneByOne(trainer),
        processes=processes,
        adversary=adversary,
        validation=measured.get("validation"),
        test=measured.get("test"),
        probes={name: measured[name] for name in data.probes if name in measured},
        samples=drawn_samples(config, data),
        target=target,
        metric=score_name(config.evaluate.metric),
        seed_adapter=seed_adapter,
        spec=named(spec, base_name(config.model.name, facts["model"]["sha256"]).name),
        tokenizer=model.tokenizer,
        manifest=facts if config.privacy is None else public_manifest(facts),
        secrets=None if config.privacy is None else facts,
    )


def _start(
    config: RunConfig, model: AdaptedModel, names: list[str], labels: Sequence[str]
) -> tuple[tuple[Client, ...], Adapter, AdapterSpec]:
    """The clients with their ranks, and their common start."""
    types = config.clients.assigned(names, config.run.seed)
    largest = max(max(kind.attention, kind.feed_forward) for kind in types.values())
    seed_adapter, spec = model.seed_adapter(largest, seed=config.run.seed)
    clients = tuple(Client(name, kind.ranks(seed_adapter.modules)) for name, kind in types.items())
    begun = _cut(seed_adapter, clients)
    return clients, begun if config.model.adapter is None else warm_start(config, begun, labels), spec


def _trainer(
    config: RunConfig, model: AdaptedModel, parts: Mapping[str, TextData], spec: AdapterSpec, programs: Path | None
) -> LocalTrainer | ProgramTrainer:
    """What trains the clients: fedlora's own loop, or their program."""
    program = config.train.program()
    if program is None:
        settings = TrainSettings(
            **config.train.model_dump(exclude={"command", "timeout"}), rounds=config.run.rounds,
            max_length=config.data.max_length, bf16=config.model.bf16, chat_template=config.template,
        )  # fmt: skip
        return LocalTrainer(model, parts, settings, seed=config.run.seed)
    return ProgramTrainer(
        program, spec, model.settings, programs or Path("programs"),
        data=training_rows(config, parts), labels=next(iter(parts.values())).label_names, rounds=config.run.rounds,
    )  # fmt: skip


def _evaluators(
    config: RunConfig, data: Dealt, model: AdaptedModel, clients: Sequence[Client], target: Target
) -> dict[str, ModelEvaluator]:
    """Held-out set -> its evaluator; without sets that are empty."""
    held = {"validation": (data.validation, data.own_validation), "test": (data.test, data.own_test)}
    held |= {name: (sets, {}) for name, sets in data.probes.items()}
    found = {name: config.evaluator(model, sets, clients, target=target, own=own) for name, (sets, own) in held.items()}
    return {name: evaluator for name, evaluator in found.items() if evaluator is not None}


def _cuts(each: Mapping[str, Cut]) -> dict[str, Any]:
    """How much of what was cut to data.max_length, without what was not."""
    return {name: asdict(cut) for name, cut in each.items() if cut.cut}


def _cut(seed_adapter: Adapter, clients: Sequence[Client]) -> Adapter:
    """The common start, cut to the largest rank that any client has in each module."""
    ranks = [client.ranks(seed_adapter.modules) for client in clients]
    modules = {}
    for name, lora in seed_adapter.modules.items():
        B, A = lora.factors
        largest = max(r[name] for r in ranks)
        modules[name] = LoRA(B[:, :largest].clone(), A[:largest].clone())
    return Adapter(modules, seed_adapter.heads)
