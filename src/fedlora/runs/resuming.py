"""Checks whether a stored run may continue with a configuration: which keys may differ, and the errors for others.

What a run reads is identified by content (`inputs`), not by location: a moved folder resumes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedlora.core import checkpoint
from fedlora.doing import doing
from fedlora.errors import CheckpointError, counted
from fedlora.runs.config import KEYS, RunConfig
from fedlora.runs.folder import RunFolder
from fedlora.runs.idle_keys import has_no_effect
from fedlora.runs.inputs import DATA, differing, is_lasting, placeless, there_now
from fedlora.runs.private_outputs import shown_config
from fedlora.runs.private_releases import keep_config, read_private
from fedlora.runs.stopping import Ranking
from fedlora.training.metrics import score_name


def changes(folder: RunFolder, config: RunConfig) -> bool:
    """Whether anything, including paths, differs from the stored configuration, if the run can continue nevertheless.

    Raises:
        CheckpointError: it cannot; the message names each such key with both values.
    """
    stored = _stored(folder)
    differing = dict(_differing(stored, config))
    wrong = {key: pair for key, pair in differing.items() if is_lasting(key) and key != "run.rounds"}
    if wrong:
        named = "; ".join(f"{key} is {theirs!r} there and {ours!r} here" for key, (theirs, ours) in wrong.items())
        raise CheckpointError(
            f"{folder.path / 'config.json'} holds another configuration: {named}. Resume with the same values, or "
            f"choose another --out."
        )
    if "run.rounds" in differing and config.privacy is not None:
        raise CheckpointError(
            f"{folder.path} holds a private run of run.rounds = {differing['run.rounds'][0]}: its epsilon holds for "
            f"these rounds, and does not cover {differing['run.rounds'][1]}. Choose another --out; the ledger charges "
            f"both."
        )
    if "run.rounds" in differing:
        _check_rounds(folder, *differing["run.rounds"], config.train.schedule)
    ahead = {key: pair for key, pair in differing.items() if key in KEYS and KEYS[key].lasting == "ahead"}
    _check_left(folder, config, ahead)
    return stored.canonical() != config.canonical()


def changed_keys(folder: RunFolder, config: RunConfig) -> set[str]:
    """The keys whose values differ from the stored configuration's."""
    return {key for key, _ in _differing(_stored(folder), config)}


def stored_classes(folder: RunFolder) -> tuple[str, ...]:
    """The classes that a folder's run began with, in order; empty if there is no run, or it has none. Works for a
    damaged manifest too: `check_content` reports the damage before the run continues."""
    try:
        data = folder.read_json("manifest.json")["data"] if folder.exists() else {}
    except CheckpointError:
        return ()
    found = data.get("labels") if isinstance(data, dict) else None
    return tuple(found) if isinstance(found, list) and all(isinstance(name, str) for name in found) else ()


def check_content(folder: RunFolder, manifest: Mapping[str, Any], stored: Mapping[str, Any] | None = None) -> None:
    """Raise `CheckpointError` unless the run reads what the stored one read, with the same number of threads. stored:
    a private run's facts, which are not in its manifest; messages then name no client and give no counts."""
    private = stored is not None
    stored = folder.read_json("manifest.json") if stored is None else stored
    _check_template(folder, stored["data"], manifest["data"])
    threads = (stored.get("threads"), manifest["threads"])
    said = f"torch's threads ({threads[0]} there, {threads[1]} here; set run.threads)"
    _check_alike(folder, stored, manifest, private, [said] * (threads[0] != threads[1]))


@doing("comparing with what the run read")
def check_finished(
    folder: RunFolder, config: RunConfig, data_root: Path | None, known: dict[str, Any] | None = None
) -> list[str]:
    """Check that a finished run's result may be shown for this configuration, without loading the model.

    Args:
        known: as in `there_now`.

    Returns:
        What is missing and therefore could not be checked, in words.

    Raises:
        CheckpointError: the run read something other than what is there now.
    """
    private = config.privacy is not None
    stored = read_private(folder, "content.json") if private else folder.read_json("manifest.json")
    now, gone = there_now(config, data_root, stored_classes(folder), known)
    _check_alike(folder, stored, json.loads(json.dumps(now)), private, [])
    return gone


def _check_alike(
    folder: RunFolder, stored: Mapping[str, Any], now: Mapping[str, Any], private: bool, said: list[str]
) -> None:
    """said: what else differs, in words."""
    other = differing(stored, now)
    if private and DATA in other:
        other[DATA] = ["the data (a private run does not say whose)"]
    said = [*(word for each in other.values() for word in each), *said]
    if said:
        raise CheckpointError(
            f"{folder.path / 'manifest.json'} records other content of: {', '.join(said)}. Continuing would mix two "
            f"runs. Restore what the run read, or choose another --out."
        )


def _check_template(folder: RunFolder, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    was, now = theirs.get("template"), ours.get("template")
    if was != now:
        raise CheckpointError(
            f"{folder.path} began with the prompt template {was!r}, but now it is {now!r}. Restore data.template, or "
            f"choose another --out."
        )


def check_manifest(folder: RunFolder, of: str) -> None:
    """Raise `CheckpointError` unless the manifest belongs to this run. of: its identity."""
    if folder.read_json("manifest.json").get("run") != of:
        raise CheckpointError(
            f"{folder.path / 'manifest.json'} belongs to another run (configuration, seed or data) than config.json "
            f"beside it: one of them was copied here. Restore it, or choose another --out."
        )


def settle(folder: RunFolder, config: RunConfig, manifest: Mapping[str, Any]) -> None:
    """Make this configuration the stored run's. From now on the run is unfinished."""
    folder.reopen()
    stored = folder.read_json("manifest.json")
    own = {name: manifest[name] for name in ("config_digest", "model")}
    if config.privacy is not None:
        keep_config(folder, config.canonical())
    folder.create(shown_config(config).canonical(), {**stored, **own})


def _stored(folder: RunFolder) -> RunConfig:
    whole = (folder.path / "private" / "config.json").is_file()  # a private run's
    found = read_private(folder, "config.json") if whole else folder.read_json("config.json")
    try:
        return RunConfig.model_validate(found)
    except ValidationError as error:
        wrong = "; ".join(".".join(map(str, e["loc"])) for e in error.errors())
        raise CheckpointError(
            f"{folder.path / 'config.json'} is not a configuration of this version of fedlora ({wrong}), so the run "
            f"cannot continue here. Choose another --out."
        ) from error


def _differing(stored: RunConfig, config: RunConfig) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Key -> (there, here), for keys that differ by more than location, unless they have no effect."""
    theirs, ours = stored.model_dump(mode="json"), config.model_dump(mode="json")
    for table in ours:
        was, now = theirs[table] or {}, ours[table] or {}  # [privacy] may be absent
        for name in dict.fromkeys((*was, *now)):
            there, here = was.get(name), now.get(name)
            key = f"{table}.{name}"
            if placeless(there) != placeless(here) and not has_no_effect(stored, key):
                yield key, (there, here)


def _check_rounds(folder: RunFolder, there: int, here: int, schedule: str) -> None:
    lines = folder.metrics()
    done = len(lines)
    if schedule != "constant":
        raise CheckpointError(
            f"{folder.path} holds a run of run.rounds = {there}, but you ask for {here}: with train.schedule = "
            f"{schedule!r} every round's learning rate depends on the number of rounds, so the finished rounds are not "
            f"those of the longer run. Only a constant schedule can be extended; choose another --out."
        )
    if here < done:
        raise CheckpointError(
            f"{folder.path} holds {done} rounds, but you ask for run.rounds = {here}: rounds cannot be undone. "
            f"Choose another --out."
        )
    if here == done and lines[-1].get("gauge_drift") is None:
        raise CheckpointError(
            f"{folder.path} holds {done} rounds of {there}, but you ask for run.rounds = {here}: round {done} was "
            f"not run as the last one (with validation, gauge check and uploads). Ask for "
            f"run.rounds = {done + 1} or more, or choose another --out."
        )


def _check_left(folder: RunFolder, config: RunConfig, late: Mapping[str, tuple[Any, Any]]) -> None:
    """Raise `CheckpointError` if keys for rounds still to be played differ, and no round is left."""
    if not late:
        return
    done, ranking = checkpoint.newest_round(folder.checkpoints) or 0, Ranking(score_name(config.evaluate.metric))
    stopped = ranking.stop(folder.metrics(), config.run.rounds, config.evaluate.stopping()) is not None
    if stopped or done >= config.run.rounds:
        named = "; ".join(f"{key} is {theirs!r} there and {ours!r} here" for key, (theirs, ours) in late.items())
        rounds = len(folder.metrics())
        more = "" if stopped or config.privacy is not None else f", ask for more rounds (run.rounds = {rounds + 1})"
        raise CheckpointError(
            f"{folder.path} holds a run of {counted(rounds, 'round')} with none left to play: {named}, and that cannot "
            f"be added to finished rounds. Set the old value{more}, or choose another --out."
        )
