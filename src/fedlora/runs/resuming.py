"""Where a run starts: afresh, or from the newest state in its folder, if that is this run's.

`identity` alone decides whether it is. It knows what was read by content, not by place, so a moved folder resumes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from fedlora.core import checkpoint
from fedlora.errors import CheckpointError
from fedlora.runs.config import RunConfig
from fedlora.runs.folder import RunFolder
from fedlora.runs.identity import differing, identity, later
from fedlora.runs.preparation import Prepared
from fedlora.runs.private_releases import begin, read_private, shown_config
from fedlora.runs.reading import flat
from fedlora.server.server import start
from fedlora.server.state import RunState

log = logging.getLogger("fedlora.runs")


def opened(prepared: Prepared, folder: RunFolder) -> tuple[RunState, str]:
    """The state to continue from (the newest sound checkpoint, or a fresh start), and the run's identity. A finished
    run's summary is gone from then on.

    Raises:
        CheckpointError: as in `execute`.
    """
    config, fresh, began = prepared.config, start(prepared.server, prepared.seed_adapter), folder.exists()
    if not began and prepared.secrets is not None:
        begin(folder)
    changed, of, loaded = not began or changes(folder, config), _identity(prepared, folder), None
    if began:
        stored = folder.read_json("manifest.json")
        if stored.get("run") != of:
            raise _other_content(folder, stored, prepared.manifest)
        state_of_method = prepared.server.method.State
        loaded = checkpoint.load_newest(folder.checkpoints, RunState, state_of_method, of=of, tell=log.warning)
        if loaded is None and folder.finished():
            raise CheckpointError(
                f"{folder.path} holds a finished run, but checkpoints/ has no state of it. Restore checkpoints/, or "
                f"choose another --out."
            )
        folder.reopen()
    if changed:
        folder.create(shown_config(config).canonical(), {**prepared.manifest, "run": of})
    folder.sweep()
    state = loaded[1] if loaded else fresh
    if (logged := len(folder.metrics())) > state.round:
        log.warning("%d rounds were logged, and the newest state is of round %d: the others are played again",
                    logged, state.round)  # fmt: skip
    return state, of


def changes(folder: RunFolder, config: RunConfig) -> bool:
    """Whether anything, including paths, differs from the stored configuration, if the run can continue nevertheless.

    Raises:
        CheckpointError: it cannot; the message names each such key with both values.
    """
    stored, config = _stored(folder), shown_config(config)
    wrong = {key: (there, here) for key, there, here in differing(stored, config) if key not in later(config)}
    if wrong:
        named = "; ".join(f"{key} is {theirs!r} there and {ours!r} here" for key, (theirs, ours) in wrong.items())
        more = " Rounds can be added under a constant schedule, without [privacy]." if "run.rounds" in wrong else ""
        raise CheckpointError(
            f"{folder.path / 'config.json'} holds another configuration: {named}. Resume with the same values, or "
            f"choose another --out.{more}"
        )
    if (done := len(folder.metrics())) > config.run.rounds:
        raise CheckpointError(
            f"{folder.path} holds {done} rounds, more than run.rounds = {config.run.rounds}. Choose another --out."
        )
    return stored.canonical() != config.canonical()


def _other_content(folder: RunFolder, stored: Mapping[str, Any], manifest: Mapping[str, Any]) -> CheckpointError:
    """Names what was read that differs between two manifests; those of a private run name no client."""
    there, here = (flat({key: one.get(key) for key in ("model", "data", "threads")}) for one in (stored, manifest))
    odd = [key.removesuffix(".sha256") for key in {**there, **here} if there.get(key) != here.get(key)]
    return CheckpointError(
        f"{folder.path / 'manifest.json'} records other content of: {', '.join(odd) or 'what it read'}. Continuing "
        f"would mix two runs. Restore what the run read, or choose another --out."
    )


def _identity(prepared: Prepared, folder: RunFolder) -> str:
    if prepared.secrets is None:
        return identity(prepared.config, prepared.manifest)
    return identity(prepared.config, prepared.secrets, read_private(folder)[1])


def _stored(folder: RunFolder) -> RunConfig:
    try:
        return RunConfig.model_validate(folder.read_json("config.json"))
    except ValidationError as error:
        wrong = "; ".join(".".join(map(str, e["loc"])) for e in error.errors())
        raise CheckpointError(
            f"{folder.path / 'config.json'} is not a configuration of this version of fedlora ({wrong}), so the run "
            f"cannot continue here. Choose another --out."
        ) from error
