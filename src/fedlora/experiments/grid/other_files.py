"""Results that look like those of a run and are of other data: they are not taken, and it is said which they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from fedlora.experiments.grid.plan import PlannedRun
from fedlora.experiments.stored.results import Result
from fedlora.runs.config import RunConfig
from fedlora.runs.own_files import MISSING, named, own_paths, with_paths


def missing_files(runs: Sequence[PlannedRun]) -> list[str]:
    """A line for each file or folder that there is not."""
    found = {key: own_paths(run.config)[key] for run in runs for key, what in run.files.items() if what == MISSING}
    return [
        f"{key}: {path} does not exist, and runs are known by its content. Relative paths start at the folder of the "
        f"experiment's file."
        for key, path in found.items()
    ]


def other_files(runs: Sequence[PlannedRun], results: Mapping[str, Result]) -> list[str]:
    """A line for each data set or model of which there are results of another content, under the same name in the same
    configuration; and for each that is not there now."""
    wanted = {named(run.config).digest(): run for run in runs if run.files and run.digest not in results}
    if not wanted:
        return []
    gone = missing_files(list(wanted.values()))
    found: Counter[tuple[str, str, str, str]] = Counter()
    for digest, result in results.items():
        run = wanted.get(_named_digest(result) or "")
        if run is None or digest == run.digest:
            continue
        there: Mapping[str, str] = result.raw.get("files", {})
        paths = own_paths(run.config)
        for key, here in run.files.items():
            if there.get(key) != here != MISSING:
                found[key, paths[key], there.get(key, ""), here] += 1
    return gone + [_line(*key, count) for key, count in found.items()]


def _line(key: str, path: str, there: str, here: str, count: int) -> str:
    results = f"{count} finished run{'s' if count > 1 else ''} of the same configuration"
    if not there:
        return (
            f"{key}: {results} {'are' if count > 1 else 'is'} of a {Path(path).name} whose content an older "
            f"version did not note, and {path} has SHA-256 {here[:12]}: they are not taken."
        )
    return (
        f"{key}: {results} {'are' if count > 1 else 'is'} of a {Path(path).name} with SHA-256 {there[:12]}, and {path} "
        f"has {here[:12]}: other data, and they are not taken."
    )


def _named_digest(result: Result) -> str | None:
    """The configuration with its files by their names alone; None where it cannot be read."""
    try:
        config = RunConfig.model_validate(result.raw["config"])
    except (ValidationError, KeyError):
        return None
    if "files" in result.raw:
        return config.digest()
    d = config.data  # of an older version: paths as they were written
    told: dict[str, object] = {f"data.clients.{client}": path for client, path in d.clients.items()}
    told |= {
        "data.train": d.train,
        "data.validation": d.validation,
        "data.test": d.test,
        "model.path": config.model.path,
    }
    return with_paths(config, {key: Path(path).name for key, path in told.items() if isinstance(path, str)}).digest()
