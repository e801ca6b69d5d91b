"""Settings that are valid alone but not together or not here, before the first round, each with the reason.

For a private run, above all: anything that would release more than the noised sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from fedlora.core.lora import Adapter, LoRA
from fedlora.core.messages import Client
from fedlora.errors import ConfigError, FedLoRAError, complaints
from fedlora.runs.client_data import Dealt
from fedlora.runs.config import RunConfig
from fedlora.runs.identity import own_files
from fedlora.runs.privacy_section import PrivacySection
from fedlora.runs.private_releases import Planned
from fedlora.runs.robust import check_rule
from fedlora.runs.tracking import check_trackers
from fedlora.server.private import Private
from fedlora.server.sampling import sample_clients
from fedlora.server.server import Server
from fedlora.training.load import check_device
from fedlora.training.measure import Target
from fedlora.training.metrics import METRICS, generates
from fedlora.training.programs import check_program


def of_parts(config: RunConfig) -> Iterator[str]:
    """What each setting alone lacks, whatever the others are: files, a method that can be made, and what this machine
    must have (a GPU, a library, the clients' program)."""
    for key, path in own_files(config).items():
        if not path.exists():
            yield f"{key}: {path} does not exist."
    device, program = config.model.chosen_device(), config.train.program()
    yield from complaints(
        config.method.build,
        lambda: check_device(device, config.model.load_in_4bit),
        lambda: check_trackers(config.run.report_to),
        *([] if program is None else [lambda: check_program(program)]),
    )


def of_settings(config: RunConfig) -> Iterator[str]:
    """What can be said before any data are read: of each setting alone, and of settings together."""
    yield from of_parts(config)
    yield from _of_metric(config)
    yield from complaints(lambda: check_private(config, built(config)))
    model = own_files(config).get("model.name")
    if model is None or model.exists():
        yield from complaints(lambda: config.model.check_targets(config.lora.target_modules))


def built(config: RunConfig) -> Server:
    """The server of that configuration. Raises `HyperparameterError`."""
    return config.server.build(config.method.build(), config.run.seed, config.robust.build())


def per_round(config: RunConfig, names: Sequence[str]) -> int:
    """How many of these clients take part in a round."""
    return len(sample_clients(names, config.run.participation, seed=0, round=0))


def of_data(config: RunConfig, data: Dealt, processes: int) -> Iterator[str]:
    """Settings that need data that are missing, or that cannot be shared by so many processes."""
    patience = config.evaluate.early_stopping_patience
    if processes > 1 and config.model.load_in_4bit:
        yield f"run.workers = {config.run.workers!r} cannot share model.load_in_4bit; leave one of them out."
    if patience is not None and not any(map(len, data.validation.values())):
        yield (
            f"evaluate.early_stopping_patience = {patience} needs validation data, and data.validation = "
            f"{config.data.validation!r}: give it a share or a file."
        )


def on_a_toy(config: RunConfig, names: Sequence[str]) -> tuple[Target, list[str]]:
    """The evaluation target, with "auto" resolved, and why the server cannot serve clients of these names, a line for
    each reason: asked of two small modules, because reading the model takes time."""
    target: Target = "clients" if config.evaluate.target == "auto" else config.evaluate.target
    try:
        kinds, server = {*config.clients.assigned(names, config.run.seed).values()}, built(config)
        r = max(max(kind.attention, kind.feed_forward) for kind in kinds)
        toy = Adapter({name: LoRA(torch.zeros(2 * r, r), torch.ones(r, 2 * r)) for name in ("attention", "mlp")}, {})
        state = server.init(toy)
        for kind in sorted(kinds):
            server.download(state, Client("one of them", kind.ranks(toy.modules)))
    except FedLoRAError as error:
        return target, [str(error)]
    if config.evaluate.target == "auto" and server.has_global_model(state):
        target = "server"
    wrong = list(_of_fit(config, server, per_round(config, names), len(names)))
    roles, name = server.roles(state), server.method.name
    if target == "server" and not server.has_global_model(state):
        wrong.append(f"{name} keeps no global model to evaluate; set evaluate.target = 'clients' (or leave it out).")
    if config.privacy is not None and not server.has_global_model(state):
        wrong.append(
            f"[privacy] covers what the server releases, and with {name} every client keeps a part, which a run would "
            f"score and write without noise. Take a method whose server has a model, such as ffa-lora."
        )
    if config.run.keep_uploads != "none" and "local" in (roles.B, roles.A):
        wrong.append(f"run.keep_uploads cannot store what never leaves a client, but {name} shares {roles}.")
    pairs = {
        "server.gauge_stress": config.server.gauge_stress is not None,
        f"attack.kind = {config.attack.kind!r}": config.attack.needs_pairs,
    }
    if not roles.both_shared:
        wrong += [f"{key} needs both factors shared, but {name} shares {roles}." for key, on in pairs.items() if on]
    return target, wrong


def _of_fit(config: RunConfig, server: Server, a_round: int, clients: int) -> Iterator[str]:
    """Options that can never work with so many clients, or with the kind of round."""
    rule, quorum = server.round.rule, server.round.quorum
    if config.run.keep_uploads != "none" and config.server.stream:
        yield "run.keep_uploads stores uploads, but server.stream keeps none: leave one of them out."
    if quorum is not None and quorum > a_round:
        yield f"server.quorum = {quorum} can never be met: {a_round} of {clients} clients take part in a round."
    if rule is not None:
        yield from complaints(lambda: check_rule(rule, a_round))


def _of_metric(config: RunConfig) -> Iterator[str]:
    """A metric of the other task, or answers that leave no room for a prompt."""
    e, task = config.evaluate, config.model.task
    if task not in METRICS[e.metric].tasks:
        wanted = "classes" if task == "causal-lm" else "generated text"
        there = ", ".join(name for name, metric in METRICS.items() if task in metric.tasks)
        yield f"evaluate.metric = {e.metric!r} is for {wanted}, but model.task is {task!r}; choose from {there}."
    elif generates(e.metric) and e.max_new_tokens >= config.data.max_length:
        yield (
            f"evaluate.max_new_tokens = {e.max_new_tokens} leaves no room for a prompt within data.max_length = "
            f"{config.data.max_length}."
        )


# ---- private runs ----------------------------------------------------------------------------------------------------


def check_private(config: RunConfig, server: Server) -> None:
    """Raise `ConfigError` or `HyperparameterError`, before any data are read, for settings that conflict with
    [privacy]."""
    section = config.privacy
    if section is None:
        return
    if found := list(_refusals(config, section)):
        raise ConfigError("; ".join(found) + ".")
    probe = section.model_copy(update={"noise_multiplier": 1.0, "epsilon": None})
    privacy = probe.build(
        Planned(), clients=["anybody"], largest=1, rounds=1, participation=config.run.participation, seed=0
    )
    replace(server, round=privacy)


def planned_privacy(config: RunConfig, section: PrivacySection, clients: Sequence[Client], start: Adapter) -> Private:
    """The privacy parameters for these clients: all of them public constants. Nothing is released yet.

    Raises:
        ConfigError: with that delta, one client's data could be published outright. HyperparameterError: no epsilon.
    """
    if section.delta >= 1 / len(clients):
        raise ConfigError(
            f"privacy.delta = {section.delta:g} with {len(clients)} clients promises nothing: publishing one random "
            f"client's data has delta = 1 / n = {1 / len(clients):.2g}. Choose a delta far below it."
        )
    run, ranks = config.run, [max(client.ranks(start.modules).values(), default=1) for client in clients]
    return section.build(
        Planned(), clients=[client.id for client in clients], largest=max(ranks), rounds=run.rounds,
        participation=run.participation, seed=run.seed,
    )  # fmt: skip


def _refusals(config: RunConfig, section: PrivacySection) -> Iterator[str]:
    """One line per conflict: what would release more than the noised sums, or has no meaning beside them."""
    run, data, evaluate = config.run, config.data, config.evaluate
    drawn = run.participation < 1
    yield from section.excludes(config.server)
    releasing = {
        "run.report_to": (drawn and run.report_to, "stores when each round ended, which tells who was drawn"),
        "run.keep_uploads": (run.keep_uploads != "none", "stores what clients sent"),
        "run.readouts": (run.readouts, "reports on single clients"),
        "evaluate.clients_at_end": (evaluate.clients_at_end, "reports on single clients"),
        "evaluate.target": (evaluate.target == "clients", "scores single clients"),
        "clients.test_fraction": (config.clients.test_fraction, "would release scores on clients' own data"),
        "attack.kind": (config.attack.on, "reports which clients were byzantine"),
        "server.gauge_stress": (config.server.gauge_stress, "is an experiment with uploads"),
        "robust.rule": (config.robust.rule != "none", "weighs each client by the others' uploads, without a bound"),
        "train.command": (config.train.command, "leaves logs and adapters of single clients in the run's folder"),
        "model.adapter": (config.model.adapter, "is a trained start, and the first download releases what it learned"),
        "data.task": (data.task == "superni" and data.task, "takes validation and test data from clients"),
    }
    for key, (there, why) in releasing.items():
        if there:
            yield f"{key} {why}, but [privacy] lets nothing but noised sums leave: leave it out"
    classes = config.model.task == "sequence-classification" and (data.clients or data.train not in (None, "demo"))
    if classes and not data.label_names:
        yield "data.label_names is missing: the head's shape would reveal which classes occur in clients' rows"
    for part in ("validation", "test") if data.clients else ():
        share = getattr(data, part)
        if not isinstance(share, str) and share:
            yield f"data.{part} = {share:g} is a share of clients' files: name a file of public data, or set it to 0"
