"""Runs that failed by themselves, as results are kept: so that a page, a table and a verdict know of them anywhere.

    results/failed/DIGEST.json    beside the results: what failed, of which commit, and the kind of error

The whole report with its traceback is in the work folder (`runs/experiments/failures`), for it may name paths. What the
machine failed, what a changed checkout failed, and what was refused before it ran say nothing of a run: they are there
alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from fedlora.errors import CheckpointError
from fedlora.experiments.stored.checked_results import Commit, Line
from fedlora.experiments.stored.stored_json import Stored, read_table, wrong_values


class Report(Stored):
    """What the work folder has."""

    error: str
    by_machine: bool = False


class KeptFailure(Stored):
    """What is kept beside results. error: the kind alone."""

    digest: Annotated[str, Field(min_length=1)]
    label: str
    error: Line
    commit: Commit


def path_of(results: Path) -> Path:
    """The folder beside the results."""
    return results.parent / "failed"


def reported(folder: Path, *, machine: bool = False) -> dict[str, str]:
    """Digest -> why, of the reports of a work folder; of what the machine failed only with `machine`. Raises
    `CheckpointError` for a damaged one: without it nobody knows whether a search may go on."""
    found = {path.stem: _read(path, Report, "Delete it, or forget all: fedlora experiment retry.")
             for path in sorted(folder.glob("*.json"))}  # fmt: skip
    return {
        digest: raw["error"].partition("\n")[0] for digest, raw in found.items() if machine or not raw.get("by_machine")
    }


def kept(folder: Path) -> dict[str, str]:
    """Digest -> the kind of error, of failures beside results. Raises `CheckpointError` for a damaged one."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*.json")):
        raw = _read(path, KeptFailure, "Restore it (git), or delete it: then its run is missing.")
        if raw["digest"] != path.stem:
            raise CheckpointError(f"the failure {path} cannot be used: it is that of {raw['digest']!r:.60}.")
        found[path.stem] = raw["error"]
    return found


def _read(path: Path, kind: type[Stored], then: str) -> Mapping[str, Any]:
    try:
        raw = read_table(path)
        kind.model_validate(raw)
    except ValidationError as error:
        raise CheckpointError(f"the failure {path} cannot be used: {wrong_values(error)}. {then}") from error
    except (OSError, ValueError) as error:
        why = error.strerror or error if isinstance(error, OSError) else error
        raise CheckpointError(f"the failure {path} cannot be used: {why}. {then}") from error
    return raw
