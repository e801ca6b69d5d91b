"""The work after each stored round: the server's own scores, the best state, trackers, and whether to stop. It reads
only the lines of rounds.jsonl, so that a federation that was killed continues as if it had not been. (Of a round whose
measurement a kill cut short, sites that stay away after the restart have no scores. And after a restart sites are sent
changes of the base whole that they had received in steps: scores may differ by rounding.)
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedlora.core import checkpoint
from fedlora.flower.rounds.choosing import due
from fedlora.flower.rounds.federation import Opening
from fedlora.flower.rounds.flower_state import FlowerState, run_identity
from fedlora.runs.finishing import best_state
from fedlora.runs.folder import plain
from fedlora.runs.stopping import Line
from fedlora.runs.tracking import Called, Trackers
from fedlora.server.state import RunState

log = logging.getLogger(__name__)


class Recorder:
    """One federation's recorder. Call `track`, then `see` for each round. trackers: close them when all are over."""

    trackers: Trackers

    def __init__(self, opening: Opening) -> None:
        self._opening = opening

    def best(self, lines: Sequence[Line]) -> Line | None:
        """The best of these rounds, if any was measured."""
        return self._opening.choosing.best(lines)

    def stopped(self, lines: Sequence[Line]) -> dict[str, Any] | None:
        """Whether the federation ends early after these rounds, and why."""
        settings = self._opening.settings
        return self._opening.choosing.stop(lines, settings.run.rounds, settings.evaluate.stopping())

    def best_state(self, line: Line | None) -> RunState | None:
        """The stored state of that round, the best one; None, with a log line, if it is lost."""
        found = best_state(self._best, FlowerState, self._opening.server.method.State, self._identity, line)
        return None if found is None else found.state

    def track(self, lines: Sequence[Line]) -> None:
        """Start trackers with all rounds before: after a restart they get them again."""
        settings = self._opening.settings
        facts = {"federation": settings.id, **json.loads(settings.travelling())}
        self.trackers = Trackers(
            settings.run.track, self._opening.home.server, facts, lines, anew=bool(lines), called=Called(settings.id)
        )

    def see(self, line: Line, flower_state: FlowerState, lines: Sequence[Line]) -> tuple[dict[str, Any], bool]:
        """(additions to a round's line, whether it was the last one). flower_state: after the round, stored. lines: of
        the finished rounds."""
        state = flower_state.state
        scores = self._measured(state)
        facts = {"metrics": plain(dict(scores))}
        whole = {**plain(dict(line)), **facts}
        before = [old for old in lines if old["round"] < line["round"]]
        best = self.best(before)
        if self._opening.choosing.better(whole, best):
            # two, since the one before is the best until this round's line is stored
            checkpoint.save(self._best, state.round, flower_state, of=self._identity, keep=2)
        self.trackers.log(whole)
        stopped = self.stopped([*before, whole])
        if stopped is not None:
            log.info("round %d: %s", line["round"], stopped["why"])
        return facts, stopped is not None

    # ---------------------------------------------------------------------------------------------------------- inside

    @property
    def _identity(self) -> str:
        opening = self._opening
        return run_identity(opening.settings.id, opening.server, opening.state.server)

    @property
    def _best(self) -> Path:
        return self._opening.home.checkpoints / "best"

    def _measured(self, state: RunState) -> Mapping[str, float]:
        """The server's scores, if it measures rounds and this one is due."""
        evaluator = self._opening.at_server.validation
        if evaluator is None or self._opening.choosing.by != "server" or not due(self._opening.settings, state.round):
            return {}
        return evaluator.evaluate(self._opening.server, state)
