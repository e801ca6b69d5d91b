"""Where a run starts: afresh, or from the newest sound state in its folder, verified as its own."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from fedlora.core import checkpoint
from fedlora.errors import CheckpointError, counted
from fedlora.runs import resuming
from fedlora.runs.exported import check_replaceable
from fedlora.runs.folder import RunFolder
from fedlora.runs.inputs import identity
from fedlora.runs.preparation import Prepared
from fedlora.runs.private_outputs import shown_config
from fedlora.runs.private_releases import begin, keep_config, read_private
from fedlora.runs.stopping import Ranking
from fedlora.server.server import start
from fedlora.server.state import RunState

log = logging.getLogger("fedlora.runs")


def opened(prepared: Prepared, folder: RunFolder, resume: bool) -> tuple[RunState, str]:
    """The state to continue from (the newest sound checkpoint, or a fresh start), and the run's identity.

    Raises:
        ConfigError, CheckpointError: as in `execute`.
    """
    fresh = start(prepared.server, prepared.seed_adapter)
    if not folder.exists():
        if prepared.secrets is not None:
            begin(folder, prepared.secrets)
            keep_config(folder, prepared.config.canonical())
        of = _identity(prepared, folder)
        folder.create(shown_config(prepared.config).canonical(), {**prepared.manifest, "run": of})
        return fresh, of
    if not resume:
        raise CheckpointError(
            f"{folder.path} already holds a run; add --resume to continue it, or choose another --out."
        )
    changed = resuming.changes(folder, prepared.config)
    if prepared.secrets is None:
        resuming.check_content(folder, prepared.manifest)
    else:
        resuming.check_content(folder, json.loads(json.dumps(prepared.secrets)), read_private(folder, "content.json"))
    of = _identity(prepared, folder)
    resuming.check_manifest(folder, of)
    if not folder.finished() and os.path.lexists(folder.sums):
        log.warning("%s is missing from a finished run: its results are rebuilt", folder.path / "summary.json")
    kind = prepared.server.method.State
    loaded = checkpoint.load_newest(folder.checkpoints, RunState, kind, of=of, tell=log.warning)
    ended = folder.ended()
    if loaded is None and ended:
        raise CheckpointError(
            f"{folder.path} holds a run that ended after {counted(ended, 'round')}, but checkpoints/ has no state "
            f"of it: continuing would train all of them again. Restore checkpoints/, or choose another --out."
        )
    state = loaded[1] if loaded else fresh
    _check_best(prepared, folder, of, folder.upto(state.round, of)[0])
    if (logged := len(folder.metrics())) > state.round:
        newest = f"the newest state in checkpoints/ is of round {state.round}" if loaded else "checkpoints/ has none"
        log.warning("metrics.jsonl has %s, but %s: later rounds are played again", counted(logged, "round"), newest)
    left = range(state.round + 1, prepared.config.run.rounds + 1)
    check_replaceable(folder, prepared.tokenizer, [client.id for client in prepared.clients], left)
    if folder.finished():
        folder.lacking()  # raises if a file of the result has changed
    if changed:
        resuming.settle(folder, prepared.config, prepared.manifest)
    folder.sweep()
    return state, of


def _identity(prepared: Prepared, folder: RunFolder) -> str:
    if prepared.secrets is None:
        return identity(prepared.config, prepared.manifest)
    return identity(prepared.config, prepared.secrets, str(read_private(folder, "run.json").get("secret")))


def _check_best(prepared: Prepared, folder: RunFolder, of: str, lines: Sequence[Mapping[str, Any]]) -> None:
    """Ensure that checkpoints/best/ has the best state of these rounds; if not, copy it from checkpoints/.

    Raises:
        CheckpointError: neither has it.
    """
    metric, kind = prepared.metric, prepared.server.method.State
    best = Ranking(metric).best(lines)
    if best is None:
        return
    round, why = best["round"], "none is there"
    checkpoint.newest_round(folder.best_checkpoint)  # raises if a directory blocks its place
    try:
        found = checkpoint.load_newest(folder.best_checkpoint, RunState, kind, of=of, tell=log.warning)
        if found is not None and (found[0] == round or found[0] > len(lines)):  # a later one will be made again
            return
        why = why if found is None else f"it has that of round {found[0]}"
    except CheckpointError as error:
        why = str(error)
    said = f"{folder.best_checkpoint}/ lacks the state of round {round}, the best one so far by {metric} ({why})"
    found = checkpoint.load_newest(folder.checkpoints, RunState, kind, of=of, upto=round, tell=log.warning)
    if found is None or found[0] != round:
        raise CheckpointError(f"{said}, and checkpoints/ no longer has it. Restore it, or choose another --out.")
    log.warning("%s: taking it from checkpoints/", said)
    checkpoint.save(folder.best_checkpoint, round, found[1], of=of, keep=1)
