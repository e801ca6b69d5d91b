"""The start of a federation's rounds, read from its folder and checked in one place, before a site is asked.

The server needs no base model for any of it; if data.validation or data.test names a file of the server's, it also
measures.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedlora.adapters.io import AdapterSpec, read_adapter
from fedlora.core.lora import Adapter
from fedlora.errors import ConfigError, counted
from fedlora.flower.places import FederationFolder
from fedlora.flower.scores import Choosing, choosing_of
from fedlora.flower.server.journal import rounds_done
from fedlora.flower.server.private import check_affordable, has_released, planned
from fedlora.flower.server.state import FederationState, check_playable, going_on
from fedlora.flower.terms.facts import check, model_facts, targets_of, versions_here
from fedlora.flower.terms.joining import JoinFile
from fedlora.flower.terms.policy import Policy
from fedlora.flower.terms.settings import FederationSettings
from fedlora.runs.client_data import read_files
from fedlora.runs.config import RunConfig
from fedlora.runs.private_run import PrivacyPlan
from fedlora.runs.reading import flat
from fedlora.runs.tracking import check_trackers
from fedlora.runs.warm_start import check_fits
from fedlora.server.server import Server, start
from fedlora.server.state import RunState
from fedlora.training.digests import model_content
from fedlora.training.measure import ModelEvaluator
from fedlora.training.templates import find_template

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class AtServer:
    """The server's memory besides the adapters; empty if it has no base model.

    validation, test: evaluators of its files, None if there are none. digests: SHA-256 of the model's files. ends:
    tokens that end an answer.
    """

    validation: ModelEvaluator | None = None
    test: ModelEvaluator | None = None
    tokenizer: Any = None
    digests: Mapping[str, str] = field(default_factory=dict)
    ends: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Opening:
    """The checked start of the rounds: nothing in it is refused later.

    server: if it is private, it releases nothing before `opened_private`, and `plan` is set. spec: of the common start.
    join: as the sites have it. rounds: the number of those that are played.
    """

    home: FederationFolder
    settings: FederationSettings
    policy: Policy
    server: Server
    plan: PrivacyPlan | None
    spec: AdapterSpec
    join: JoinFile
    at_server: AtServer
    choosing: Choosing
    rounds: int


def opening(folder: Path, tell: Callable[[str], None] = log.debug) -> tuple[Opening, FederationState]:
    """Make all checks of a ServerApp before it asks a site; `fedlora doctor` calls it too. It writes nothing. Also
    returns the state to go on from: the newest sound one, or that before the first round.

    tell: receives a line for each damaged checkpoint in whose place an older one is used.

    Raises:
        ConfigError, AdapterFormatError: files that are missing or do not fit; other settings than the sites have;
            rounds that would be taken back or lost.
    """
    home = FederationFolder(folder.resolve())
    settings = FederationSettings.load(home.settings)
    check_trackers(settings.run.report_to)
    if threads := settings.run.torch_threads():  # as at the sites: bit-for-bit results need one number of threads
        torch.set_num_threads(threads)
    policy = Policy.read(home.policy)
    seed_adapter, spec = read_adapter(home.start, scaling=settings.lora.unit)
    server, plan, state = playable(settings, policy, seed_adapter)
    if plan is not None and not has_released(home):
        check_affordable(settings, server, plan)
    join, config = JoinFile.read(home.join), settings.for_server()
    here = versions_here() if config is None else model_facts(str(settings.base), settings)
    check(join.facts, {**here, "targets": targets_of(seed_adapter.modules)}, "the server now")
    at_server = AtServer() if config is None else load_at_server(config, seed_adapter)
    choosing = choosing_of(settings, server.has_global_model(state.server))
    damaged: list[str] = []

    def skip(line: str) -> None:
        damaged.append(line)
        tell(line)

    begun = going_on(home.checkpoints, settings.id, server, state, skip)
    rounds = begun.state.round
    check_agreed(home, settings, join, rounds)
    if rounds > settings.run.rounds:
        raise ConfigError(
            f"{rounds} rounds are played, but run.rounds = {settings.run.rounds} asks for fewer, and nobody can undo a "
            f"round. Set run.rounds = {rounds} to end here, or more to continue."
        )
    if (last := rounds_done(home.rounds)) > rounds + len(damaged):
        raise ConfigError(
            f"{home.rounds} has {counted(last, 'round')}, but the newest state in {home.checkpoints} is that of round "
            f"{rounds}: later ones were moved or deleted. Restore them from a backup; or, to play these rounds again, "
            f"remove their lines from {home.rounds.name} by hand. Nothing was changed."
        )
    return Opening(home, settings, policy, server, plan, spec, join, at_server, choosing, rounds), begun


def check_agreed(home: FederationFolder, settings: FederationSettings, join: JoinFile, rounds: int) -> None:
    """Raises `ConfigError` if a setting differs from that in join.toml, by which sites train and the rounds until now
    were played: each key with both values, and what to do."""
    then, now = flat(join.agreed), flat(settings.agreed())
    keys = [key for key in {**then, **now} if then.get(key) != now.get(key) and key not in settings.may_change]
    if keys:
        differences = "; ".join(
            f"{key} was {json.dumps(then.get(key))} and is {json.dumps(now.get(key))} now" for key in keys
        )
        way = f"Call fedlora flower renew {home.path}, and give every site the new join.toml"
        if rounds:
            way = (
                f"{rounds} rounds are played: set it back, or make another federation (fedlora flower init, with "
                f"--start {home.adapter} to begin with this one's adapter)"
            )
        raise ConfigError(
            f"federation.toml says something else than join.toml, which the sites have: {differences}. {way}."
        )


def playable(
    settings: FederationSettings, policy: Policy, seed_adapter: Adapter
) -> tuple[Server, PrivacyPlan | None, RunState]:
    """The server of these settings, its plan if it is private, and its state before the first round. `init`, `admit`,
    `remove`, `doctor`, `serve` and the rounds call it, so that none accepts what another refuses. It writes nothing.

    Raises:
        FedLoRAError: settings that contradict each other, or a policy that cannot be played with them.
    """
    server = settings.server.build(settings.method.build(), settings.run.seed, settings.robust.build())
    plan: PrivacyPlan | None = None
    if settings.privacy is not None:
        settings.privacy.check_members(policy.clients)
        server, plan = planned(settings, server, seed_adapter)
    state = start(server, seed_adapter)
    check_playable(policy.clients, server, state.server, settings.run.participation)
    return server, plan, state


def load_at_server(config: RunConfig, start: Adapter) -> AtServer:
    """The server's own base model and files, loaded and checked against the common start.

    Args:
        config: `FederationSettings.for_server`: data.validation and data.test are files of the server's, or 0.

    Raises:
        ConfigError, DataError: a file cannot be read; the start does not fit the model.
    """
    files = {part: path for part in ("validation", "test") if isinstance(path := getattr(config.data, part), str)}
    text = read_files(config, list(dict.fromkeys(files.values())))
    labels = config.data.label_names or next((data.label_names for data in text.values()), ())
    config.model.check_targets(config.lora.target_modules)
    model = config.model.load(config.lora, labels, config.run.seed)
    mine, _ = model.seed_adapter(1, seed=config.run.seed)
    check_fits(mine, start, f"start/, beside model.name = {config.model.name!r},")
    ends = () if config.template is None else find_template(config.template, model.tokenizer).ends
    made = {
        part: config.evaluator(model, {"": text[path]}, (), target="server", own={}) for part, path in files.items()
    }
    digests = model_content(config.model.location())
    return AtServer(made.get("validation"), made.get("test"), model.tokenizer, digests, ends)
