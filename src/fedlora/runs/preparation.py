"""A configuration made real: the data read and dealt out, the model loaded, the server and its clients put together."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedlora.adapters.io import AdapterSpec
from fedlora.attacks import Adversary
from fedlora.core.lora import Adapter, LoRA
from fedlora.core.messages import Client
from fedlora.core.trainer import OneByOne, Workers
from fedlora.data import TextData
from fedlora.errors import ConfigError
from fedlora.runs.attack_section import attack_facts
from fedlora.runs.base_names import base_name
from fedlora.runs.client_data import Dealt
from fedlora.runs.config import RunConfig
from fedlora.runs.defence import check_rule
from fedlora.runs.exported import named
from fedlora.runs.inputs import dealt_out
from fedlora.runs.manifest import manifest, straddling
from fedlora.runs.private_checks import check_private, planned_privacy
from fedlora.runs.private_outputs import public_manifest
from fedlora.runs.samples import draw_samples
from fedlora.runs.tracking import check_trackers
from fedlora.server.closing import largest_shares
from fedlora.server.sampling import sample_clients
from fedlora.server.server import Server
from fedlora.server.state import ServerState
from fedlora.training.evaluation import ModelEvaluator, Target
from fedlora.training.local import LocalTrainer
from fedlora.training.metrics import METRICS, generates, score_name
from fedlora.training.models import AdaptedModel
from fedlora.training.prompting import end_tokens, find_template
from fedlora.training.settings import TrainSettings

log = logging.getLogger("fedlora.runs")


@dataclass(frozen=True, eq=False)
class Prepared:
    """All parts of a run, loaded and checked.

    parts: client -> its training data. workers: who trains, and how many clients at a time. processes: how many do the
    work, see `crew`. adversary: the clients that lie, None where nobody does. manifest: what is told of the run; of a
    private one without what is known of clients' data, which is in `secrets`. test: on the test data; probes: further
    test sets by name ("unseen", "validation_mismatched"), measured at the end only. samples: held-out prompts of a
    language model whose answers are kept, before and after.

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
    trainer: LocalTrainer
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


def prepare(config: RunConfig, data_root: Path | None = None, label_names: Sequence[str] = ()) -> Prepared:
    """Read the data, deal it out, load the model. Nothing is written.

    Args:
        data_root: where the files of `data.task` are. Not part of the configuration: it says where, not what.
        label_names: the classes of a run that is gone on with, `stored_classes` of its folder. By default data.labels,
            or all that occur.

    Raises:
        ConfigError, DataError, HyperparameterError: what cannot be run as written.

    Example:
        >>> prepared = prepare(load_config(Path("config.toml")))
        >>> sorted(prepared.parts)
        ['site-1', 'site-2', 'site-3']
    """
    server = config.server.build(config.method.build(), config.run.seed, config.defence.build())
    check_private(config, server)
    if threads := config.run.torch_threads():
        torch.set_num_threads(threads)
    check_trackers(config.run.track)
    config.model.check_targets(config.lora.targets)
    _check_task(config)
    data, adversary = dealt_out(config, data_root, label_names)
    if config.data.task == "mnli" and not data.probes:
        log.warning(
            "data.task = 'mnli' from --data-root has one test set: matched or mixed, as the file has it. "
            "validation_mismatched is on the hub only (leave --data-root out), and this run will have no such number."
        )
    _check_measuring(config, data)
    parts = data.parts
    types = config.clients.assigned(list(parts), config.run.seed)
    labels = next(iter(parts.values())).label_names
    a_round = len(sample_clients(list(parts), config.run.participation, seed=0, round=0))
    processes = config.run.processes(config.model.chosen_device(), a_round)
    if processes > 1 and config.model.four_bit:
        raise ConfigError(f"model.four_bit cannot be shared by run.workers = {config.run.workers!r}; leave one out.")
    if processes > 1 and config.model.remember_prefix:
        raise ConfigError(
            f"model.remember_prefix remembers in one process, and run.workers = {config.run.workers!r} trains in "
            f"{processes}: leave one of them out."
        )
    model = config.model.load(
        config.lora, labels, config.run.seed, device="cpu" if processes > 1 else None
    )  # with several processes, each moves its own to its device
    largest = max(max(kind.attention, kind.feed_forward) for kind in types.values())
    seed_adapter, spec = model.seed_adapter(largest, seed=config.run.seed)
    clients = tuple(Client(name, kind.ranks(seed_adapter.modules)) for name, kind in types.items())
    seed_adapter = _cut(seed_adapter, clients)
    if config.privacy is not None:
        server = replace(server, privacy=planned_privacy(config, clients, seed_adapter))
    initial = server.init(seed_adapter)
    for client in clients:  # a method that cannot serve these ranks says so now, not after the first round
        server.download(initial, client)
    target = config.evaluate.target
    if target == "auto":
        target = "server" if server.has_global_model(initial) else "clients"
    _check_fit(config, server, initial, target, clients)
    _check_liars(config, server, initial, clients, {name: float(len(part)) for name, part in parts.items()})
    bf16, max_length = config.model.bf16, config.data.max_length
    template = config.data.prompting() if config.model.task == "causal-lm" else None
    settings = TrainSettings(
        **config.train.model_dump(), rounds=config.run.rounds, max_length=max_length, loss_on=config.data.loss_on,
        bf16=bf16, template=template, own_starts=config.clients.starts == "own",
    )  # fmt: skip

    def evaluator(sets: Mapping[str, TextData], own: Mapping[str, TextData]) -> ModelEvaluator | None:
        return config.evaluate.evaluator(
            model, sets, clients, target=target, own=own, max_length=max_length, bf16=bf16, template=template
        )  # fmt: skip

    ends: tuple[int, ...] = ()
    if config.model.task == "causal-lm":  # what cannot be asked is said before training, not after it
        ends = end_tokens(find_template(template, model.tokenizer), model.tokenizer)
    validation, test = evaluator(data.validation, data.own_validation), evaluator(data.test, data.own_test)
    probes = {name: evaluator(sets, {}) for name, sets in data.probes.items()}
    trainer = LocalTrainer(model, parts, settings, seed=config.run.seed)
    facts = {
        **manifest(config, data, clients, model, server.method),
        "evaluation_target": target,
        "cut": {client: asdict(cut) for client, cut in trainer.cut().items() if cut.cut},
        "copies": straddling(data),
        "answer_ends": list(ends),
        **({"attack": attack_facts(adversary)} if adversary is not None else {}),
        "cut_held_out": {
            name: {how: asdict(cut) for how, cut in found.items()}
            for name, each in {"validation": validation, "test": test, **probes}.items()
            if each is not None and (found := each.cut())
        },
    }
    told = facts if config.privacy is None else public_manifest(facts)
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
        validation=validation,
        test=test,
        probes={name: probe for name, probe in probes.items() if probe is not None},
        samples=_samples(config, data),
        target=target,
        metric=score_name(config.evaluate.metric),
        seed_adapter=seed_adapter,
        spec=named(spec, base_name(config.model.path, facts["model"]["sha256"]).name),
        tokenizer=model.tokenizer,
        manifest=told,
        secrets=None if config.privacy is None else facts,
    )


def _check_measuring(config: RunConfig, data: Dealt) -> None:
    """Raises `ConfigError` for settings of evaluation that ask for data which are not there, or measure none of it."""
    e = config.evaluate
    if e.patience is not None and not any(len(part) for part in data.validation.values()):
        raise ConfigError(
            f"evaluate.patience = {e.patience} looks at the validation metric, and there are no validation data: "
            f"data.validation = {config.data.validation!r}. Give it a share or a file, or leave patience out."
        )
    beside = config.clients.own_test is not None and config.data.test != 0  # else they are the common test set
    if beside and not e.clients_at_end and e.target != "clients":
        raise ConfigError(
            f"clients.own_test = {config.clients.own_test:g} holds out data that nothing would measure: set "
            f"evaluate.clients_at_end = true (or 'both', for the common test set too), or leave own_test out."
        )
    if e.clients_at_end == "both" and not (data.own_test and any(len(part) for part in data.test.values())):
        there = "a common one only" if not data.own_test else "each client's own only"
        raise ConfigError(
            f"evaluate.clients_at_end = 'both' is the clients' own test sets and the common one, and there is {there}. "
            f"Give clients.own_test and data.test, or set it to true."
        )


def _check_task(config: RunConfig) -> None:
    """Raises `ConfigError` where something is set for a language model, and the task is another one."""
    if config.model.task == "causal-lm":
        return
    for section, key in (("data", "template"), ("data", "messages"), ("evaluate", "samples")):
        table = getattr(config, section)
        if getattr(table, key) != type(table).model_fields[key].default:
            raise ConfigError(
                f"{section}.{key} = {getattr(table, key)!r} is of language models, and model.task is "
                f"{config.model.task!r}: leave one of them out."
            )


def _samples(config: RunConfig, data: Dealt) -> TextData | None:
    """Held-out prompts whose answers are kept: of the test data, or of validation where there are none."""
    if config.model.task != "causal-lm":
        return None
    held = [list(sets.values()) for sets in (data.test, data.validation)]
    chosen = next((sets for sets in held if any(len(part) for part in sets)), [])
    return draw_samples(chosen, config.evaluate.samples, config.run.seed)


def _check_fit(
    config: RunConfig, server: Server, initial: ServerState, target: Target, clients: Sequence[Client]
) -> None:
    """Raises `ConfigError` for options that can never work with this method or these clients."""
    name, roles = server.method.name, server.roles(initial)
    if config.model.task not in METRICS[config.evaluate.metric].tasks:
        wanted = "classes" if config.model.task == "causal-lm" else "generated text"
        there = ", ".join(name for name, metric in METRICS.items() if config.model.task in metric.tasks)
        raise ConfigError(
            f"evaluate.metric = {config.evaluate.metric!r} is of {wanted}, and model.task is {config.model.task!r}; "
            f"there is {there}."
        )
    if generates(config.evaluate.metric) and config.evaluate.max_new_tokens >= config.data.max_length:
        raise ConfigError(
            f"evaluate.max_new_tokens = {config.evaluate.max_new_tokens} leaves no room for a prompt within "
            f"data.max_length = {config.data.max_length}."
        )
    if config.server.heads is not None and not initial.heads:
        raise ConfigError(
            f"server.heads = {config.server.heads!r} has no effect: the model has no fully trained head. Leave it out, "
            f"or name modules to train in full in lora.saved."
        )
    if config.clients.starts == "own" and not roles.both_shared:
        raise ConfigError(
            f"clients.starts = 'own' draws each client's A anew, and {name} shares {roles}: there a factor belongs to "
            f"the server or stays at home. Leave it out, or take a method that gets both factors."
        )
    if config.server.gauge_stress is not None and not roles.both_shared:
        raise ConfigError(f"server.gauge_stress needs both factors shared, and {name} shares {roles}.")
    if config.attack.needs_pairs and not roles.both_shared:
        raise ConfigError(f"attack.kind = {config.attack.kind!r} needs both factors shared, and {name} shares {roles}.")
    if config.attack.space == "factors" and config.server.upload == "subspace":
        raise ConfigError(
            "attack.space = 'factors' needs uploads in the coordinates of the readouts, and server.upload = 'subspace' "
            "has its own: leave one of them out."
        )
    if target == "server" and not server.has_global_model(initial):
        raise ConfigError(
            f"{name} keeps no global model to evaluate; set evaluate.target = 'clients' (or leave it out)."
        )
    if config.server.upload == "subspace" and not roles.both_shared:
        raise ConfigError(f"server.upload = 'subspace' needs both factors shared, and {name} shares {roles}.")
    if config.run.keep_uploads != "none" and "local" in (roles.B, roles.A):
        raise ConfigError(f"run.keep_uploads cannot store what never leaves a client, and {name} shares {roles}.")
    drops = (
        "server.memory" if server.memory is not None else "server.sketch_rank" if config.server.sketch_rank else None
    )
    if config.run.keep_uploads != "none" and drops:
        raise ConfigError(f"run.keep_uploads stores a round's uploads, and {drops} keeps none of them.")
    server.open(initial)  # says so if its memory is too small
    names = [client.id for client in clients]
    a_round = len(sample_clients(names, config.run.participation, seed=0, round=0))
    if server.quorum is not None and server.quorum > a_round:
        raise ConfigError(
            f"server.quorum = {server.quorum} can never be met: {a_round} of {len(names)} clients take part in a round."
        )


def _check_liars(
    config: RunConfig, server: Server, initial: ServerState, clients: Sequence[Client], examples: Mapping[str, float]
) -> None:
    """Raises `ConfigError` where a robust rule cannot bear its liars in any round. examples: of each client."""
    if server.rule is None:
        return
    a_round = len(sample_clients(list(examples), config.run.participation, seed=0, round=0))
    p = largest_shares(examples if server.weighs_by == "examples" else dict.fromkeys(examples, 1.0), a_round)
    ranks = [client.ranks(initial.modules) for client in clients]
    if near := check_rule(server.rule, server.method, ranks, p, config.server.upload):
        log.warning("%s", near)


def _cut(seed_adapter: Adapter, clients: Sequence[Client]) -> Adapter:
    """The common start at the largest rank that any client has of each module."""
    ranks = [client.ranks(seed_adapter.modules) for client in clients]
    modules = {}
    for name, lora in seed_adapter.modules.items():
        B, A = lora.factors
        largest = max(r[name] for r in ranks)
        modules[name] = LoRA(B[:, :largest].clone(), A[:largest].clone())
    return Adapter(modules, seed_adapter.heads)
