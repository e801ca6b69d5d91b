"""Play all of a federation's remaining rounds: the main function of a ServerApp."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from fedlora.core import files
from fedlora.flower.locks import locked
from fedlora.flower.messages.codecs import OwnClients
from fedlora.flower.places import FederationFolder
from fedlora.flower.rounds.collecting import Clock, Identify, registered_names
from fedlora.flower.rounds.federation import Opening, opening
from fedlora.flower.rounds.finishing import finish
from fedlora.flower.rounds.flower_state import FlowerState
from fedlora.flower.rounds.hooks import RoundHooks
from fedlora.flower.rounds.private_federation import opened_private
from fedlora.flower.rounds.private_rounds import PrivateRounds
from fedlora.flower.rounds.recording import Recorder
from fedlora.flower.rounds.round_lines import fitting_summary
from fedlora.flower.rounds.strategy import FedLoRA
from fedlora.flower.terms.facts import agreed, server_facts
from fedlora.runs.private_run import PrivateRun

log = logging.getLogger(__name__)


def play(grid: Grid, folder: Path, *, identify: Identify = registered_names, clock: Clock = time) -> dict[str, Any]:
    """Play all remaining rounds, then write adapters and a summary. The main function of a ServerApp.

    A finished federation plays nothing and returns its summary again; raising run.rounds in federation.toml extends it.
    If it is raised during play, this call ends with the rounds of its start, and the next one plays the others.
    """
    home = FederationFolder(folder.resolve())
    with played_by_one(home.server):
        b = opening(folder, log.warning)
        newest, b = b.newest, replace(b, newest=None)  # kept by the strategy alone, whose rounds replace it
        settings = b.settings
        private = opened_private(home, settings, b.server, b.plan, b.rounds) if b.plan is not None else None
        b = b if private is None else replace(b, server=private.server)
        recorder = Recorder(b)
        strategy = _strategy(b, newest, private, recorder, identify, clock)
        del newest
        stopped = recorder.stopped(strategy.lines.finished())
        summary = fitting_summary(home.summary, settings, strategy.round)
        if summary is not None and (strategy.round == settings.run.rounds or stopped is not None):
            log.info("%s", ending(summary))
            return summary
        files.write(home.played_with, b.played_with)
        home.summary.unlink(missing_ok=True)
        recorder.track(strategy.lines.finished())
        if stopped is None:
            strategy.start(grid, num_rounds=settings.run.rounds)
        return finish(grid, b, strategy, recorder, private)


def ending(summary: Mapping[str, Any]) -> str:
    """A sentence or two: the federation is over, and how to continue."""
    early, private = summary.get("stopped_early"), "privacy" in summary
    if early:
        way = "begin another federation with its adapter (fedlora flower init --start)"
        if private and early.get("best_round") is None:
            way = (
                "raise the budget in the ledger, if the population may lose more (fedlora privacy LEDGER --budget), "
                "and start it again"
            )
        return (
            f"this federation ended at round {summary['rounds']} of {summary['of']}: {early['why']}. To go on, {way}."
        )
    way = "To go on, raise run.rounds in federation.toml"
    if private:
        way = "Epsilon was promised for these: more rounds are another federation, charged to the same ledger"
    return (
        f"this federation is finished: all {summary['rounds']} rounds are played, and its adapter is in "
        f"server/adapter. {way}."
    )


@contextmanager
def played_by_one(server: Path) -> Iterator[None]:
    """Let only one ServerApp play the rounds in FED/server, because two would write to one checkpoint folder.

    Raises:
        ConfigError: another process does; the message has its id. OSError: the lock cannot be made.
    """
    server.mkdir(parents=True, exist_ok=True)
    with locked(server / ".lock", lambda who: (
        f"the rounds in {server} are being played by process {who}. Two runs of one federation would undo each other: "
        f"wait for that run, or end it (`fedlora flower status` shows how far it is)."
    )):  # fmt: skip
        yield


def _strategy(
    b: Opening, newest: FlowerState | None, private: PrivateRun | None, recorder: Recorder, identify: Identify,
    clock: Clock,
) -> FedLoRA:  # fmt: skip
    """The strategy at its last checkpoint. The recorder sees each stored round, and may end the federation."""
    settings = b.settings

    def after_round(line: Mapping[str, Any]) -> dict[str, Any]:
        facts, last = recorder.see(line, strategy.flower_state, strategy.lines.finished())
        if last:
            strategy.stop("stopped early")
        return facts

    terms = settings.privacy
    hooks = RoundHooks() if private is None or terms is None else PrivateRounds(private, terms)
    strategy = FedLoRA(
        b.server,
        b.policy,
        b.state,
        policy_file=b.home.policy,
        run=settings.id,
        folder=b.home.checkpoints,
        record=b.home.server,
        resume=newest,
        participation=settings.run.participation,
        seed=settings.run.seed,
        codec=OwnClients(
            settings.travelling(),
            lambda: server_facts(settings, agreed(b.home.agreement), b.seed_adapter.modules),
        ),
        identify=identify,
        after_round=after_round,
        choosing=None if private is not None else b.choosing,  # no site measures
        hooks=hooks,
        clock=clock,
    )
    return strategy
