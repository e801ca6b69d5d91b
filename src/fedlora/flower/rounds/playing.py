"""All rounds of a federation that are still to do: what a ServerApp's main is."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from fedlora.core import checkpoint
from fedlora.errors import BudgetSpent, ConfigError, LedgerError
from fedlora.flower.places import FederationFolder
from fedlora.flower.rounds.collecting import Clock
from fedlora.flower.rounds.federation import Federation, open_federation
from fedlora.flower.rounds.finishing import finish
from fedlora.flower.rounds.measured_where import due
from fedlora.flower.rounds.private_words import RELEASED, public_numbers
from fedlora.flower.rounds.progress import numbers_of_round
from fedlora.flower.rounds.server_lock import held
from fedlora.flower.rounds.strategy import Identify, registered_names
from fedlora.flower.terms.settings import FederationSettings
from fedlora.given_files import RECORDS, parse_json, read_given
from fedlora.runs.folder import plain
from fedlora.runs.tracking import Tracker, make_tracker

log = logging.getLogger(__name__)
Line = Mapping[str, Any]


def play(grid: Grid, folder: Path, *, identify: Identify = registered_names, clock: Clock = time) -> dict[str, Any]:
    """All rounds that are still to do, then adapters and a summary. What a ServerApp's main is.

    One that is finished plays nothing and gives its summary again; raising run.rounds in federation.toml extends it:
    what was raised while it played is played by the next call, and then there is no summary yet.
    """
    home = FederationFolder(folder.resolve())
    with held(home.server):
        federation = open_federation(folder, identify=identify, clock=clock)
        strategy, settings = federation.strategy, federation.settings
        finished = _finished(federation)
        if finished is not None:
            log.info("%s", told(finished))
            return finished
        federation.history.write(home.server / "settings.json")
        home.summary.unlink(missing_ok=True)
        trackers = _trackers(federation)
        strategy.after_round = _AfterRound(federation, trackers)
        if federation.stopped(federation.lines()) is None:
            try:
                strategy.start(grid, num_rounds=settings.run.rounds)
            except (BudgetSpent, LedgerError) as error:  # it would come again
                raise ConfigError(str(error)) from error
        asked = FederationSettings.load(home.settings).run.rounds  # it may have been raised since
        if asked > settings.run.rounds and federation.stopped(federation.lines()) is None:
            log.info("%d rounds are asked for by now: it goes on, with the settings of now", asked)
            return {"rounds": strategy.round, "of": asked, "finished": False}
        return finish(grid, federation, trackers)


def told(summary: Mapping[str, Any]) -> str:
    """That a federation is over, and what to do to go on, in a sentence or two."""
    if not summary.get("finished", True):
        return f"{summary['rounds']} of {summary['of']} rounds are played, and the rest follow."
    early = summary.get("stopped_early")
    if early and "privacy" in summary and early.get("best_round") is None:
        return (
            f"this federation ended at round {summary['rounds']} of {summary['of']}: {early['why']}. To go on, raise "
            f"the budget in the ledger, if the population may lose more (fedlora privacy LEDGER --budget), and start "
            f"it again."
        )
    if early:
        return (
            f"this federation ended at round {summary['rounds']} of {summary['of']}: {early['why']}. To go on, raise "
            f"evaluate.patience in federation.toml, or leave it out."
        )
    if "privacy" in summary:
        return (
            f"this federation is finished: all {summary['rounds']} rounds are played that epsilon was promised for, "
            f"and its adapter is in server/adapter. More rounds are another federation, charged to the same ledger."
        )
    return (
        f"this federation is finished: all {summary['rounds']} rounds are played, and its adapter is in "
        f"server/adapter. To go on, raise run.rounds in federation.toml."
    )


@dataclass(frozen=True, eq=False)
class _AfterRound:
    """What follows each round whose state is stored: measuring at the server, the best state, trackers, early stop."""

    federation: Federation
    trackers: Sequence[Tracker]

    def __call__(self, line: Line) -> Mapping[str, Any]:
        federation, strategy = self.federation, self.federation.strategy
        state = strategy.memory.state
        scores: Mapping[str, float] = {}
        evaluator = federation.at_server.validation
        if evaluator is not None and federation.server_measures and due(federation.settings, state.round):
            scores = evaluator.evaluate(strategy.server, state)
        facts = {"metrics": plain(dict(scores))}
        whole = {**plain(dict(line)), **facts}
        before = [old for old in federation.lines() if old["round"] < line["round"]]
        choosing, best = federation.choosing, federation.best(before)
        if choosing is not None and choosing.replaces(whole, best):
            checkpoint.keep_also(federation.best_checkpoint, federation.folder.checkpoints, state.round, keep=2)
        for tracker in self.trackers:
            tracker.log(line["round"], numbers(federation, whole))
        stopped = federation.stopped([*before, whole])
        if stopped is not None:
            log.info("round %d: %s", line["round"], stopped["why"], extra=RELEASED)  # by public examples, if private
            strategy.stop("stopped early")
        return facts


def _trackers(federation: Federation) -> list[Tracker]:
    """Trackers that know all rounds before: after a restart they are told them again."""
    lines, settings = federation.lines(), federation.settings
    facts = {"federation": settings.id, **json.loads(settings.travelling())}
    made = [
        make_tracker(name, federation.folder.server, facts, anew=bool(lines), called=settings.id)
        for name in settings.run.track
    ]
    for tracker in made:
        for line in lines:
            tracker.log(line["round"], numbers(federation, line))
    return made


def numbers(federation: Federation, line: Line) -> dict[str, float]:
    """What trackers are told of a round; of a private one what may leave."""
    found = numbers_of_round(line)
    return found if federation.private is None else public_numbers(found, line)


def _finished(federation: Federation) -> dict[str, Any] | None:
    """The summary of a federation that has nothing left to do, with these settings."""
    try:
        summary = parse_json(read_given(federation.folder.summary, RECORDS), nan_as_none=True)
        rounds, settings = summary["rounds"], summary["settings"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    same = rounds == federation.strategy.round and settings == json.loads(federation.settings.travelling())
    done = rounds == federation.settings.run.rounds or federation.stopped(federation.lines()) is not None
    return dict(summary) if same and done else None


__all__ = ["play", "told"]
