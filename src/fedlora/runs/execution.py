"""Executes a run: plays the rounds and stores everything in its folder.

`execute(prepared, folder)` is a generator of rounds that stores as it goes. If it is killed at any moment, calling it
again on the same folder continues with the same bits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace

from fedlora.doing import doing
from fedlora.errors import BudgetSpent
from fedlora.privacy.releases import filtered
from fedlora.runs.crew import crewed
from fedlora.runs.finishing import finish
from fedlora.runs.folder import RunFolder, plain
from fedlora.runs.preparation import Prepared
from fedlora.runs.private_releases import shown_config
from fedlora.runs.private_run import PrivateRun, check_affordable, opened_private
from fedlora.runs.resuming import opened
from fedlora.runs.stopping import Ranking
from fedlora.runs.storing import Checkpoints, diagnosed, keep_uploads
from fedlora.runs.tracking import Called, Trackers
from fedlora.server.state import RunState
from fedlora.simulation import RoundRecord, simulate


def execute(
    prepared: Prepared,
    folder: RunFolder,
    *,
    resume: bool = False,
    called: Called | None = None,
    on_client: Callable[[str], None] = lambda client: None,
) -> Iterator[RoundRecord]:
    """Run all remaining rounds, storing each; then write the adapters, the test result and the summary.

    If `evaluate.early_stopping_patience` ends the run early, its final round counts as the last in every respect.
    called: the run's name and group at trackers (run.report_to); by default its folder's name. on_client: as in
    `simulate`.

    Raises:
        ConfigError: the folder holds files of something other than a run; nothing is written.
        CheckpointError: it holds a run and `resume` is off, a run of another configuration, or one whose states are
            gone.
        Whatever `simulate` raises; all finished rounds are stored by then.

    Example:
        >>> prepared = prepare(load_config(Path("config.toml"), ["run.rounds=1"]))
        >>> [record.round for record in execute(prepared, RunFolder(Path("runs/one")))]
        [1]
    """
    folder.check_place(resume)
    if not folder.exists():
        check_affordable(prepared)  # before creating a folder
    with crewed(prepared.working_in(folder.path / "programs")) as crew, folder.held():
        yield from _executed(crew, folder, called, on_client)


def _executed(
    prepared: Prepared, folder: RunFolder, called: Called | None, on_client: Callable[[str], None]
) -> Iterator[RoundRecord]:
    config, resumed = prepared.config, folder.exists()
    state, of = opened(prepared, folder)
    private = opened_private(prepared, folder, state.server)
    if private is not None:
        prepared = replace(prepared, server=private.server)
    lines = folder.rewind(state.round)
    shown = json.loads(shown_config(config).canonical())
    trackers = Trackers(config.run.report_to, folder.path, shown, lines, anew=resumed, called=called)
    checkpoints = Checkpoints(prepared, folder, of, lines)
    ranking, patience, rounds = Ranking(prepared.metric), config.evaluate.stopping(), config.run.rounds
    stopped = ranking.stop(lines, rounds, patience)
    for event in _events(prepared, state, rounds if stopped is None else state.round, private, on_client):
        if isinstance(event, str):
            why = f"{event}. `fedlora privacy LEDGER --budget` raises it, permanently and visibly to all; then --resume"
            stopped = {"round": state.round, "of": rounds, "best_round": None, "best": None, "why": why}
            checkpoints.keep(state)
            break
        before, state = state, event.state
        stopped = ranking.stop([*lines, plain({"round": event.round, "metrics": event.metrics})], rounds, patience)
        last = state.round == rounds or stopped is not None
        line = diagnosed(prepared, before, event, last=last)
        if private is not None:
            line = filtered("metrics.jsonl", {**line, "privacy": private.spent(event.round)})
        lines.append(plain(line))
        if config.run.keep_uploads == "all" or (last and config.run.keep_uploads == "last"):
            keep_uploads(prepared, folder, before, event)
        folder.append_metrics(lines[-1])
        checkpoints.see(lines[-1], state, last=last)
        trackers.log(lines[-1])
        yield event
        if last:
            break
    with doing("testing, and writing the adapters", closed=private is not None):
        finish(prepared, folder, state, of, stopped=stopped, trackers=trackers, private=private)


def _events(
    prepared: Prepared, state: RunState, rounds: int, private: PrivateRun | None, on_client: Callable[[str], None]
) -> Iterator[RoundRecord | str]:
    """The engine's rounds up to `rounds`; then the reason if a private run's budget ends earlier. Raises `BudgetSpent`
    if it cannot cover the first round."""
    config, done = prepared.config, state.round
    try:
        for record in simulate(
            prepared.server, prepared.clients, prepared.workers, state, rounds=rounds,
            participation=config.run.participation if private is None else 1.0,  # a private server draws itself
            seed=config.run.seed, evaluator=prepared.validation, evaluate_every=config.evaluate.every,
            hooks=config.server.hooks(config.run.seed), adversary=prepared.adversary, on_client=on_client,
        ):  # fmt: skip
            done += 1
            yield record
    except BudgetSpent:
        if private is None or not done:
            raise
        yield private.releases.why_spent(done)
