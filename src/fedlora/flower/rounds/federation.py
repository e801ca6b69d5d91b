"""A federation's folder, and the rounds that a ServerApp plays with it: to the end of its settings, from where it is.

What is measured after each round, which round is the best, when it is enough, and what is left behind when it is over.
No base model is needed at the server for any of it; where [at_server] names one, the server measures too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedlora.adapters.io import AdapterSpec, read_adapter
from fedlora.core import checkpoint
from fedlora.core.lora import Adapter
from fedlora.errors import ConfigError
from fedlora.flower.messages.codecs import OwnClients
from fedlora.flower.places import FederationFolder
from fedlora.flower.rounds.attempt import capped
from fedlora.flower.rounds.choosing import Choosing
from fedlora.flower.rounds.collecting import Clock
from fedlora.flower.rounds.measured_where import check, choosing_of, due, sites_measure
from fedlora.flower.rounds.private_federation import opened_private, planned
from fedlora.flower.rounds.private_strategy import PrivateFedLoRA
from fedlora.flower.rounds.results import check_readouts
from fedlora.flower.rounds.round_lines import RoundLines
from fedlora.flower.rounds.server_evaluation import AtServer, load_at_server
from fedlora.flower.rounds.settings_history import History, held_out_digest
from fedlora.flower.rounds.site_evaluation import Asking
from fedlora.flower.rounds.strategy import FedLoRA, Identify, registered_names
from fedlora.flower.terms.agreement import check as check_facts
from fedlora.flower.terms.facts import Agreement, model_facts, server_facts
from fedlora.flower.terms.policy import Policy
from fedlora.flower.terms.settings import FederationSettings
from fedlora.runs.private_run import PrivacyPlan, PrivateRun
from fedlora.server.server import Server, start
from fedlora.server.state import RunState
from fedlora.training.metrics import score_name

log = logging.getLogger(__name__)
Line = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Federation:
    """A federation's folder, opened: where it stands, and what it measures with."""

    folder: FederationFolder
    settings: FederationSettings
    strategy: FedLoRA
    spec: AdapterSpec
    base_digest: str
    at_server: AtServer
    choosing: Choosing | None
    history: History
    private: PrivateRun | None = None

    @property
    def best_checkpoint(self) -> Path:
        """Where the best round's state is kept."""
        return self.folder.checkpoints / "best"

    def lines(self) -> list[Line]:
        """The finished rounds, as rounds.jsonl has them."""
        lines = RoundLines(self.folder.rounds, upto=self.strategy.round)
        return [line for line in lines.all() if "metrics" in line]

    @property
    def server_measures(self) -> bool:
        """Whether rounds are measured at the server."""
        has_model = self.strategy.server.has_global_model(self.strategy.memory.state.server)
        return has_model and self.settings.evaluate.target != "clients" and self.at_server.validation is not None

    def best(self, lines: Sequence[Line]) -> Line | None:
        """The best of these rounds, if any was measured."""
        return None if self.choosing is None else self.choosing.best(self._comparable(lines))

    def stopped(self, lines: Sequence[Line]) -> dict[str, Any] | None:
        """Whether it ends early after these rounds, and why."""
        if self.choosing is None:
            return None
        patience, rounds = self.settings.evaluate.stopping(), self.settings.run.rounds
        return self.choosing.stop(self._comparable(lines), rounds, patience)

    def _comparable(self, lines: Sequence[Line]) -> list[Line]:
        since = self.history.comparable_since()
        return [line for line in lines if line["round"] > since]


@dataclass(frozen=True, eq=False)
class Begun:
    """What the rounds begin with, checked: nothing of it is refused."""

    home: FederationFolder
    settings: FederationSettings
    policy: Policy
    server: Server
    plan: PrivacyPlan | None
    seed_adapter: Adapter
    spec: AdapterSpec
    state: RunState
    agreement: Agreement
    at_server: AtServer
    choosing: Choosing | None
    rounds: int
    history: History


def begun(folder: Path, *, measure: bool = True) -> Begun:
    """All that a ServerApp refuses before it asks a site, in one place: `fedlora doctor` calls it too. Nothing is
    written. measure: load what the server measures with, where it has a model.

    Raises:
        ConfigError, AdapterFormatError, Disagreement: files that are missing or do not fit; settings that may not
            change between rounds, and did; rounds that would be taken back.
    """
    home = FederationFolder(folder.resolve())
    settings = FederationSettings.load(home.settings)
    check(settings)
    if threads := settings.run.torch_threads():  # as at the sites: results are bit for bit at one number of threads
        torch.set_num_threads(threads)
    policy = Policy.read(home.policy)
    server = settings.server.build(settings.method.build(), settings.run.seed, settings.defence.build())
    seed_adapter, spec = read_adapter(home.start, scaling=settings.lora.unit)
    plan: PrivacyPlan | None = None
    if settings.privacy is not None:
        server, plan = planned(settings, server, seed_adapter)
    capped(server, policy)
    state = start(server, seed_adapter)
    check_readouts(settings, server, state)
    agreement = Agreement.read(home.agreement)
    config = settings.for_server()
    if config is None or not measure:
        at_server = AtServer()
    else:
        _check_base(settings, agreement, home)
        at_server = load_at_server(config, seed_adapter)
    choosing = choosing_of(settings, at_server, server.has_global_model(state.server)) if measure else None
    rounds = checkpoint.newest_round(home.checkpoints) or 0
    if rounds > settings.run.rounds:
        raise ConfigError(
            f"{rounds} rounds are played, and run.rounds = {settings.run.rounds} asks for fewer: rounds cannot be "
            f"taken back. Set run.rounds = {rounds} to keep it as it is, or more to go on."
        )
    history = History.read(home.server / "settings.json")
    examples = at_server.examples if choosing is not None and choosing.by == "server" else None
    held_out = held_out_digest(settings, examples) if measure else history.held_out
    history = history.with_(settings, rounds, held_out)
    return Begun(home, settings, policy, server, plan, seed_adapter, spec, state, agreement, at_server, choosing,
                 rounds, history)  # fmt: skip


def open_federation(
    folder: Path, *, identify: Identify = registered_names, clock: Clock = time, measure: bool = True
) -> Federation:
    """A federation at its last checkpoint, checked against the settings of the rounds before. Nothing is written but,
    the first time, a private one's id.

    Raises:
        ConfigError: as `begun`, which has `measure`, too.
    """
    b = begun(folder, measure=measure)
    home, settings = b.home, b.settings
    more: dict[str, Any] = {
        "run": settings.id,
        "folder": home.checkpoints,
        "resume": True,
        "seed": settings.run.seed,
        "codec": OwnClients(
            settings.server.upload,
            settings.travelling(),
            server_facts(settings, b.agreement, b.seed_adapter.modules),
            known=lambda: Agreement.read(home.agreement).facts,
        ),
        "identify": identify,
        "clock": clock,
        "policy_file": home.policy,
        "record": home.server,
    }
    private: PrivateRun | None = None
    strategy: FedLoRA
    if settings.privacy is not None and b.plan is not None:
        private = opened_private(home, settings, b.server, b.plan, b.rounds)
        strategy = PrivateFedLoRA(b.policy, b.state, private=private, terms=settings.privacy, **more)
    else:
        asking = Asking(
            score_name(settings.evaluate.metric), lambda round: sites_measure(settings) and due(settings, round)
        )
        strategy = FedLoRA(
            b.server, b.policy, b.state, participation=settings.run.participation, asking=asking, **more
        )  # fmt: skip
    return Federation(
        home, settings, strategy, b.spec, b.agreement.facts.base, b.at_server, b.choosing, b.history, private
    )


def _check_base(settings: FederationSettings, agreement: Agreement, home: FederationFolder) -> None:
    """Raises `Disagreement` where the server would measure with another base model than the sites train."""
    mine = model_facts(str(settings.at_server.model), settings, home.base_cache)
    for line in check_facts(server_facts(settings, agreement), mine, "the server's own model", whole=False):
        log.info("%s", line)


__all__ = ["Begun", "Federation", "begun", "open_federation"]
