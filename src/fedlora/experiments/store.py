"""The storage of results: a file for each experiment, a line for each finished run, sorted by digest.

    results/NAME.jsonl      first what all runs of the file share, then a line per run with the rest
    results/failed.json     digest -> label, commit, and the kind of error, for runs that failed on their own
    results/plans/          how many seeds, and why (`seed_plan`)

A run belongs to the experiment that made it first, and all that need its digest find it. Processes may write to one
folder at the same time: a lease is held while a file is read, changed and replaced.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedlora.core import files
from fedlora.errors import CheckpointError
from fedlora.experiments.leases import alone
from fedlora.experiments.origin import made_by, noted
from fedlora.experiments.result import History, Result, content, short_config
from fedlora.given_files import parse_json
from fedlora.runs.config import RunConfig
from fedlora.runs.folder import RunFolder, plain

FAILED = "failed.json"
MERGERS = "mergers.json"  # in a run's folder: the results of `mergers` from its uploads
_LOCK = ".lock"


def read_results(folder: Path) -> dict[str, Result]:
    """Digest -> result, from all files there. A file is read again only after a change. Raises `CheckpointError` for a
    file that does not hold results, or if two contradict each other about one run."""
    found: dict[str, Result] = {}
    for path in sorted(folder.glob("*.jsonl")):
        own = read_results_of(path)
        if other := next((digest for digest in own if found.get(digest, own[digest]) != own[digest]), None):
            raise CheckpointError(
                f"the run {other} stands in {path} and in another file there, with other numbers: two versions of the "
                f"folder were joined. Take its line out of one of the two."
            )
        found |= own
    return found


def gather(folder: Path, name: str, result: Result) -> None:
    """Add a run to NAME.jsonl, or replace it there, keeping mergers that the new result lacks."""
    with alone(folder / _LOCK):
        for path in sorted(folder.glob("*.jsonl")):
            if (before := read_results_of(path).get(result.digest)) is not None:
                name, result = path.stem, result.with_mergers_of(before)
        path = folder / f"{name}.jsonl"
        found = read_results_of(path) if path.is_file() else {}
        files.write(path, as_lines({**found, result.digest: result}))


def rewrite(folder: Path, name: str, results: Mapping[str, Result]) -> None:
    """Write NAME.jsonl with these runs alone; stored ones stay as they are, because only they have the run's time."""
    path = folder / f"{name}.jsonl"
    with alone(folder / _LOCK):
        before: Mapping[str, Result] = {}
        with suppress(CheckpointError, FileNotFoundError):
            before = read_results_of(path)
        if before.keys() != results.keys():
            files.write(path, as_lines({digest: before.get(digest, one) for digest, one in results.items()}))


def read_results_of(path: Path) -> Mapping[str, Result]:
    """The results of one file, as in `read_results`."""
    with path.open("rb") as file:  # NFS asks the server for a file's facts when it is opened, not for `path.stat()`
        seen = os.fstat(file.fileno())
    return _read(path, (seen.st_mtime_ns, seen.st_size, seen.st_ino))


def as_lines(results: Mapping[str, Result]) -> str:
    """The content of a file: what all results share, then each by its digest. Each line names its first line: otherwise
    two versions of a file, joined line by line, would give a run the facts that others share."""
    each = [_rounded(_shortest(results[digest])) for digest in sorted(results)]
    shared = _shared(each)
    first = _line({"shared": shared})
    return "\n".join([first, *(_line({**_without(one, shared), "of": _mark(first)}) for one in each), ""])


def _line(of: Mapping[str, Any]) -> str:
    return json.dumps(of, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _mark(first: str) -> str:
    """The name by which lines refer to a first line."""
    return hashlib.sha256(first.encode()).hexdigest()[:8]


def summarise(folder: RunFolder, config: RunConfig, wall_seconds: float = 0.0) -> Result:
    """A finished run's folder as one result. config: as planned, or as stored."""
    summary, manifest = folder.read_json("summary.json"), folder.read_json("manifest.json")
    data = manifest["data"]
    raw = plain(
        {
            **summary,
            "digest": manifest["config_digest"],
            "config": short_config(config),
            "ranks": manifest["clients"],
            "examples": {client: part["examples"] for client, part in data["train"].items() if "examples" in part},
            "held_out": {part: data[part].get("examples", 0) for part in ("validation", "test")},
            "data": data_of(data),
            "categories": data["categories"],
            "model": content(manifest["model"]["sha256"]),
            "gauge_drift": summary.get("gauge_drift") or {},
            "wall_seconds": round(wall_seconds, 1),
            "versions": manifest["versions"] | {"python": manifest["python"]},
            **_made(folder, manifest),
            "mergers": folder.read_json(MERGERS) if (folder.path / MERGERS).is_file() else {},
        }
    )
    return Result.model_validate({**raw, "history": History.of(plain(folder.metrics()))})


def data_of(facts: Mapping[str, Any]) -> dict[str, str]:
    """Part of the data -> a digest of a manifest's facts about it."""
    return {part: content(facts[part]) for part in ("train", "validation", "test", "probes")}


def _made(folder: RunFolder, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The first commit, clean only if every part's is; the machine; and the parts."""
    parts = noted(folder)
    if not parts:
        return {**made_by(manifest)}
    first = parts[0]["commit"]
    clean = all(part["commit"] is not None and part["commit"]["clean"] for part in parts)
    commit = first and {**first, "clean": clean}
    more = {"parts": parts} if len(parts) > 1 else {}
    return {"commit": commit, "machine": parts[-1]["machine"], **more}


# ---- failures --------------------------------------------------------------------------------------------------------


def read_failed(folder: Path) -> dict[str, str]:
    """Digest -> the kind of error, for runs that failed on their own in a clean checkout."""
    return {digest: told["error"] for digest, told in _failed(folder).items()}


def note_failed(folder: Path, digest: str, told: Mapping[str, Any]) -> None:
    """told: label, error (its kind), commit."""
    _change_failed(folder, lambda found: {**found, digest: dict(told)})


def forget_failed(folder: Path, digests: Collection[str]) -> None:
    if not _failed(folder).keys().isdisjoint(digests):
        _change_failed(folder, lambda found: {d: told for d, told in found.items() if d not in digests})


def _failed(folder: Path) -> dict[str, Any]:
    path = folder / FAILED
    return dict(json.loads(path.read_bytes())) if path.is_file() else {}


def _change_failed(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    with alone(folder / _LOCK):
        files.write(folder / FAILED, json.dumps(change(_failed(folder)), indent=1, sort_keys=True) + "\n")


# ---- lines -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)  # each version of a file is an entry: bounded, and a changed file is read again
def _read(path: Path, seen: tuple[int, int, int]) -> dict[str, Result]:
    found: dict[str, Result] = {}
    number = 1
    try:
        first, *lines = path.read_text(encoding="utf-8").splitlines() or [""]
        shared = parse_json(first)["shared"]
        for number, line in enumerate(lines, start=2):
            own = parse_json(line)
            if own.pop("of", None) != _mark(first):
                raise CheckpointError(
                    f"{path}, line {number}, belongs to another first line than the file has: two versions of the file "
                    f"were joined, or its first line was edited. Take one version whole (git checkout --ours or "
                    f"--theirs); `fedlora experiment run` makes the runs that it lacks."
                )
            raw = _with(own, shared)
            if raw["digest"] in found:
                raise ValueError(f"the digest {raw['digest']} stands there twice")
            raw["test"] = {"best": raw["test"]["last"], **raw["test"]}
            found[raw["digest"]] = Result.model_validate(raw)
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        why = f"{type(error).__name__}: {error}".splitlines()
        way = "" if number == 1 else (
            ", or take the line out: then its run is missing, and `fedlora experiment run` makes it again"
        )  # fmt: skip
        raise CheckpointError(
            f"{path}, line {number}, is no result ({' '.join(why[:3])}). Restore the file (git){way}."
        ) from error
    return found


def _shortest(result: Result) -> dict[str, Any]:
    """The result without defaults; if the best round is the last one, its scores are stored once."""
    told = result.model_dump(mode="json", exclude_defaults=True)
    if result.test.best == result.test.last:
        told["test"] = {"last": told["test"].get("last", {})}
    return told


def _shared(each: list[dict[str, Any]]) -> dict[str, Any]:
    """What is equal in all of them; for tables their common part."""
    first, others = (each[0], each[1:]) if each else ({}, [])
    found: dict[str, Any] = {}
    for key, value in first.items():
        theirs = [other[key] for other in others if key in other]
        if key == "digest" or len(theirs) < len(others):
            continue
        if all(value == other for other in theirs):
            found[key] = value
        elif all(isinstance(other, dict) for other in (value, *theirs)) and (inner := _shared([value, *theirs])):
            found[key] = inner
    return found


def _without(value: Mapping[str, Any], shared: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `_with`."""
    found = {}
    for key, own in value.items():
        if key not in shared:
            found[key] = own
        elif own != shared[key]:
            found[key] = _without(own, shared[key])
    return found


def _with(own: Mapping[str, Any], shared: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(shared)
    for key, value in own.items():
        inner = shared.get(key)
        found[key] = _with(value, inner) if isinstance(inner, dict) and isinstance(value, dict) else value
    return found


def _rounded(value: Any) -> Any:
    """The value rounded to six digits, more than a result has, which keeps files small. Identities stay exact."""
    if isinstance(value, Mapping):
        return {key: item if key in ("config", "merger") else _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
