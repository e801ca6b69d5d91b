"""Settings that are valid alone but not together or not here, before the first round, each with the reason.

For a private run, above all: anything that would release more than the noised sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fedlora.core.lora import Adapter
from fedlora.core.messages import Client
from fedlora.core.method import Roles
from fedlora.errors import ConfigError, said_by
from fedlora.runs.client_data import Dealt
from fedlora.runs.config import RunConfig
from fedlora.runs.inputs import own_paths
from fedlora.runs.privacy_section import PrivacySection
from fedlora.runs.private_releases import Planned
from fedlora.runs.robust import check_rule
from fedlora.runs.tracking import check_trackers
from fedlora.server.private import Private
from fedlora.server.sampling import sample_clients
from fedlora.server.server import Server
from fedlora.server.state import ServerState
from fedlora.training.load import check_device
from fedlora.training.measure import Target
from fedlora.training.metrics import METRICS, generates
from fedlora.training.programs import check_program


def of_settings(config: RunConfig) -> Iterator[str]:
    """What can be said before any data are read, a sentence each: of each setting alone, and of settings together."""
    gone = missing(config)
    yield from of_parts(config)
    yield from of_metric(config)
    yield from said_by(
        lambda: check_private(config, built(config)),
        *([] if "model.name" in gone else [lambda: config.model.check_targets(config.lora.target_modules)]),
    )


def of_parts(config: RunConfig) -> Iterator[str]:
    """What each setting alone lacks, whatever the others are: files, a method that can be made, and `of_machine`."""
    for key, path in missing(config).items():
        yield f"{key}: {path} does not exist."
    yield from said_by(config.method.build)
    yield from of_machine(config)


def missing(config: RunConfig) -> dict[str, str]:
    """Key -> path of the user's own files that are not there."""
    return {key: path for key, path in own_paths(config).items() if not Path(path).exists()}


def built(config: RunConfig) -> Server:
    """The server of that configuration. Raises `HyperparameterError`."""
    return config.server.build(config.method.build(), config.run.seed, config.robust.build())


def of_machine(config: RunConfig) -> Iterator[str]:
    """What this machine lacks for the run: a GPU, a library, the clients' program."""
    device, program = config.model.chosen_device(), config.train.program()
    yield from said_by(
        lambda: check_device(device, config.model.load_in_4bit),
        lambda: check_trackers(config.run.report_to),
        *([] if program is None else [lambda: check_program(program)]),
    )


def of_processes(config: RunConfig, processes: int) -> Iterator[str]:
    """Settings that do not work with several processes."""
    if processes > 1 and config.model.load_in_4bit:
        yield f"run.workers = {config.run.workers!r} cannot share model.load_in_4bit; leave one of them out."


def of_measuring(config: RunConfig, data: Dealt) -> Iterator[str]:
    """Evaluation settings that need data that are missing, or would measure nothing."""
    e = config.evaluate
    if e.patience is not None and not any(len(part) for part in data.validation.values()):
        yield (
            f"evaluate.early_stopping_patience = {e.patience} needs the validation metric, but there are no validation "
            f"data: data.validation = {config.data.validation!r}. Give it a share or a file, or leave "
            f"early_stopping_patience out."
        )
    if e.test_along and not (any(map(len, data.validation.values())) and any(map(len, data.test.values()))):
        yield (
            f"evaluate.test_along = true scores the test set beside the validation data, and one of them is missing: "
            f"data.validation = {config.data.validation!r}, data.test = {config.data.test!r}. Give both, or leave "
            f"test_along out."
        )
    if e.clients_at_end == "both" and not (data.own_test and any(len(part) for part in data.test.values())):
        there = "a common one only" if not data.own_test else "each client's own only"
        yield (
            f"evaluate.clients_at_end = 'both' needs the clients' own test sets and the common one; there is {there}. "
            f"Give clients.test_fraction and data.test, or set it to true."
        )


def of_fit(
    config: RunConfig, server: Server, initial: ServerState, target: Target, clients: Sequence[Client]
) -> Iterator[str]:
    """Options that can never work with this method or these clients."""
    yield from _of_roles(config, server.method.name, server.roles(initial))
    if target == "server" and not server.has_global_model(initial):
        yield (
            f"{server.method.name} keeps no global model to evaluate; set evaluate.target = 'clients' (or leave it "
            f"out)."
        )
    if config.run.keep_uploads != "none" and config.server.stream:
        yield "run.keep_uploads stores uploads, but server.stream keeps none: leave one of them out."
    names, quorum = [client.id for client in clients], server.round.quorum
    a_round = len(sample_clients(names, config.run.participation, seed=0, round=0))
    if quorum is not None and quorum > a_round:
        yield f"server.quorum = {quorum} can never be met: {a_round} of {len(names)} clients take part in a round."


def of_metric(config: RunConfig) -> Iterator[str]:
    """A metric of the other task, or answers that leave no room for a prompt."""
    if config.model.task not in METRICS[config.evaluate.metric].tasks:
        wanted = "classes" if config.model.task == "causal-lm" else "generated text"
        there = ", ".join(name for name, metric in METRICS.items() if config.model.task in metric.tasks)
        yield (
            f"evaluate.metric = {config.evaluate.metric!r} is for {wanted}, but model.task is {config.model.task!r}; "
            f"choose from {there}."
        )
    elif generates(config.evaluate.metric) and config.evaluate.max_new_tokens >= config.data.max_length:
        yield (
            f"evaluate.max_new_tokens = {config.evaluate.max_new_tokens} leaves no room for a prompt within "
            f"data.max_length = {config.data.max_length}."
        )


def _of_roles(config: RunConfig, name: str, roles: Roles) -> Iterator[str]:
    """name, roles: the method's."""
    if config.server.gauge_stress is not None and not roles.both_shared:
        yield f"server.gauge_stress needs both factors shared, but {name} shares {roles}."
    if config.attack.needs_pairs and not roles.both_shared:
        yield f"attack.kind = {config.attack.kind!r} needs both factors shared, but {name} shares {roles}."
    if config.run.keep_uploads != "none" and "local" in (roles.B, roles.A):
        yield f"run.keep_uploads cannot store what never leaves a client, but {name} shares {roles}."


def check_byzantine(config: RunConfig, server: Server, clients: Sequence[str]) -> None:
    """Raise `ConfigError` if a round is too small for the robust rule."""
    if server.round.rule is not None:
        check_rule(server.round.rule, len(sample_clients(clients, config.run.participation, seed=0, round=0)))


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
    check_delta(config, len(clients))
    run, ranks = config.run, [max(client.ranks(start.modules).values(), default=1) for client in clients]
    return section.build(
        Planned(), clients=[client.id for client in clients], largest=max(ranks), rounds=run.rounds,
        participation=run.participation, seed=run.seed,
    )  # fmt: skip


def check_delta(config: RunConfig, clients: int) -> None:
    """Raise `ConfigError` if one client's data could be published outright. clients: their number."""
    if config.privacy is not None and config.privacy.delta >= 1 / clients:
        raise ConfigError(
            f"privacy.delta = {config.privacy.delta:g} with {clients} clients: publishing one random client's data has "
            f"delta = 1 / n = {1 / clients:.2g}, so this promises nothing. Choose a delta far below it."
        )


def _refusals(config: RunConfig, section: PrivacySection) -> Iterator[str]:
    """One line per conflict: what would release more than the noised sums, or has no meaning beside them."""
    run, data, evaluate = config.run, config.data, config.evaluate
    poisson = section.sampling == "poisson"
    if not poisson and run.participation != 1.0:
        yield (
            f"run.participation = {run.participation:g} and privacy.sampling = 'all' contradict each other: set "
            f"sampling = 'poisson' (a secret draw, which lowers epsilon), or leave participation out"
        )
    if poisson and run.participation == 1.0:
        yield "privacy.sampling = 'poisson' draws each client with chance run.participation, now 1: set it below 1"
    yield from section.excludes(config.server)
    told = {
        "run.report_to": (poisson and run.track, "stores when each round ended, which tells who was drawn in secret"),
        "run.keep_uploads": (run.keep_uploads != "none", "stores what clients sent"),
        "run.readouts": (run.readouts, "reports on single clients"),
        "evaluate.clients_at_end": (evaluate.clients_at_end, "reports on single clients"),
        "evaluate.target": (evaluate.target == "clients", "scores single clients"),
        "evaluate.test_along": (evaluate.test_along, "would release scores on the test set after each round"),
        "clients.test_fraction": (config.clients.test_fraction, "would release scores on clients' own data"),
        "attack.kind": (config.attack.on, "reports which clients were byzantine"),
        "server.gauge_stress": (config.server.gauge_stress, "is an experiment with uploads"),
        "robust.rule": (config.robust.rule != "none", "weighs each client by the others' uploads, without a bound"),
        "train.command": (config.train.command, "leaves logs and adapters of single clients in the run's folder"),
        "model.adapter": (config.model.adapter, "is a trained start, and the first download releases what it learned"),
        "data.task": (data.task == "superni" and data.task, "takes validation and test data from clients"),
    }
    for key, (there, why) in told.items():
        if there:
            yield f"{key} {why}, but [privacy] lets nothing but noised sums leave: leave it out"
    if (
        (data.clients or data.train not in (None, "demo"))
        and config.model.task == "sequence-classification"
        and not data.labels
    ):
        yield (
            "data.label_names is missing: without it the head's shape would reveal which classes occur in clients' "
            "rows. Name the classes"
        )
    for part in ("validation", "test") if data.clients else ():
        share = getattr(data, part)
        if not isinstance(share, str) and share:
            yield (
                f"data.{part} = {share:g} is a share of each client's own file, and its scores would be released: name "
                f"a file of public data, or set data.{part} = 0"
            )
