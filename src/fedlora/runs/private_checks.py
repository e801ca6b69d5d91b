"""What a run with [privacy] may not have beside it: settings by which more than the noised sums would leave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fedlora.core.lora import Adapter
from fedlora.core.messages import Client
from fedlora.errors import ConfigError
from fedlora.runs.config import RunConfig
from fedlora.runs.private_releases import Planned
from fedlora.server.private_options import Privacy
from fedlora.server.server import Server


def check_private(config: RunConfig, server: Server) -> None:
    """Raises `ConfigError` or `HyperparameterError`, before any data are read, for what [privacy] cannot go with."""
    section = config.privacy
    if section is None:
        return
    found = list(_refusals(config))
    if found:
        raise ConfigError("; ".join(found) + ".")
    probe = section.model_copy(update={"noise_multiplier": 1.0, "epsilon": None})
    privacy = probe.build(
        Planned(), clients=["anybody"], largest=1, rounds=1, participation=config.run.participation, seed=0
    )
    replace(server, privacy=privacy)


def planned_privacy(config: RunConfig, clients: Sequence[Client], start: Adapter) -> Privacy:
    """What the configuration says, for these clients: public constants, all of them. It releases nothing yet.

    Raises:
        ConfigError: a delta that lets one of so many clients be shown whole. HyperparameterError: no epsilon.
    """
    section = config.privacy
    if section is None:
        raise ConfigError("this configuration has no table [privacy].")
    count, run = len(clients), config.run
    if section.delta >= 1 / count:
        raise ConfigError(
            f"privacy.delta = {section.delta:g} with {count} clients: to show one of them at random, whole, has delta "
            f"= 1 / n = {1 / count:.2g}, so this promises nothing. Take a delta far below it."
        )
    largest = max(max(client.ranks(start.modules).values(), default=1) for client in clients)
    return section.build(
        Planned(), clients=[client.id for client in clients], largest=largest, rounds=run.rounds,
        participation=run.participation, seed=run.seed,
    )  # fmt: skip


def _refusals(config: RunConfig) -> Iterator[str]:
    """A line for each thing."""
    section, run, data, clients, evaluate = config.privacy, config.run, config.data, config.clients, config.evaluate
    if section is None:
        return
    if section.sampling == "all" and run.participation != 1.0:
        yield (
            f"run.participation = {run.participation:g} and privacy.sampling = 'all' contradict each other: set "
            f"sampling = 'poisson' (a secret draw, which makes epsilon smaller), or leave participation out"
        )
    if section.sampling == "poisson" and run.participation == 1.0:
        yield "privacy.sampling = 'poisson' draws each client with chance run.participation, which is 1: set it below 1"
    if section.sampling == "poisson" and run.track:
        yield (
            f"run.track = {list(run.track)} stores when each round ended, which tells who was drawn, and "
            f"privacy.sampling = 'poisson' counts on nobody knowing: leave run.track out"
        )
    if run.keep_uploads != "none":
        yield (
            f"run.keep_uploads = {run.keep_uploads!r} stores what clients sent, and [privacy] promises that only "
            f"noised sums leave: leave it out"
        )
    if config.attack.kind != "none":
        yield (
            f"attack.kind = {config.attack.kind!r} is an experiment that tells who lied and how, and a private run "
            f"tells of no single client: leave one of them out"
        )
    if config.server.gauge_stress is not None:
        yield "server.gauge_stress is an experiment with uploads, and [privacy] shows nothing of them: leave it out"
    if clients.own_test is not None:
        yield (
            f"clients.own_test = {clients.own_test:g} measures on clients' own data, and scores are released: leave it "
            f"out"
        )
    if evaluate.target == "clients":
        yield "evaluate.target = 'clients' is a score for each client, and a private run tells of none: leave it out"
    if evaluate.clients_at_end or run.readouts:
        key = "evaluate.clients_at_end" if evaluate.clients_at_end else "run.readouts"
        yield f"{key} tells of single clients, and a private run tells of none: leave it out"
    if data.task == "superni":
        yield "data.task = 'superni' holds validation and test data out of the clients' own: it cannot be private here"
    own = bool(data.clients) or data.train not in (None, "demo")
    if own and config.model.task == "classification" and data.labels is None:
        yield (
            "data.labels is missing: which classes occur in the clients' rows is theirs, and the head's shape would "
            "tell it: name the classes"
        )
    if data.clients:
        for part in ("validation", "test"):
            share = getattr(data, part)
            if not isinstance(share, str) and share:
                yield (
                    f"data.{part} = {share:g} is a share of each client's own file, and scores on it are released: "
                    f"name a file of public data, or set data.{part} = 0"
                )
