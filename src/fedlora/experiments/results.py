"""Results: a file of JSON lines for an experiment, a line for each run, which the launcher alone writes; and as frames.

While runs go on, lines are appended and flushed; at the end the file is sorted by digest, and written anew as a whole.
A line has no path, and except for `machine` and seconds nothing about where it was made.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedlora.core import files
from fedlora.errors import CheckpointError
from fedlora.experiments.grid import Planned
from fedlora.experiments.scores import Line, own_data, parse_number
from fedlora.runs.folder import RunFolder, plain
from fedlora.runs.reading import flat

if TYPE_CHECKING:
    from pandas import DataFrame

_PRIVACY = ("epsilon_planned", "delta", "noise_multiplier", "sampling", "rounds_planned", "clip")
_SUMMARY = ("method", "metric", "target", "rounds", "best_round", "clients_at_end", "probes", "bytes", "seconds")


def make(run: Planned, folder: RunFolder) -> dict[str, Any] | None:
    """The line of a finished run, from its folder; None if it is not finished.

    digest, experiment, cell, seed, value, stage: of the plan. history: scores on validation and losses, by columns.
    own_data: the held-out sets that are each client's own. read: digests of the model and of the data; None for a
    private run, which does not tell them.
    """
    if not folder.finished():
        return None
    summary, manifest = folder.read_json("summary.json"), folder.read_json("manifest.json")
    data, commit = manifest["data"], manifest["commit"] or {"id": "unknown", "clean": True}
    return {
        **_planned(run),
        **{key: plain(summary.get(key)) for key in _SUMMARY},
        "validation": {name: _whole(summary["validation"].get(name)) for name in ("last", "best")},
        "test": {name: summary["test"].get(name) or {} for name in ("last", "best")},
        "own_data": own_data(run.config),
        "categories": data["categories"],
        "ranks": manifest["clients"],
        "classes": len(summary.get("classes") or ()),
        "gauge_drift": summary.get("gauge_drift") or {},
        "privacy": {key: value for key, value in (summary.get("privacy") or {}).items() if key in _PRIVACY} or None,
        "history": history(folder.metrics()),
        "config": _named(folder.read_json("config.json")),
        "read": {
            "model": _digest(manifest["model"]["sha256"]),
            "data": _digest([data["train"], data.get("test")]) if data["train"] else None,
        },
        "commit": commit["id"][:12] + ("" if commit["clean"] else "+dirty"),
        "machine": _machine(manifest),
        "versions": manifest["versions"] | {"python": manifest["python"]},
    }  # fmt: skip


def failed(run: Planned, why: str) -> dict[str, Any]:
    """The line of a run whose uploads are refused because it diverged: it has no number, and will have none."""
    return {**_planned(run), "failed": why}


def history(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The rounds of metrics.jsonl, by columns. losses: client -> its training loss in each round. scores: name -> its
    value on validation in each of the rounds `evaluated`. None: no number. Details of clients and groups are left out.
    """
    measured = [line for line in rounds if line["metrics"]]
    names = dict.fromkeys(n for line in measured for n in line["metrics"] if "/" not in n)
    clients = dict.fromkeys(name for line in rounds for name in line.get("losses") or ())
    return {
        "evaluated": [line["round"] for line in measured],
        "scores": {name: [line["metrics"].get(name) for line in measured] for name in names},
        "losses": {name: [(line.get("losses") or {}).get(name) for line in rounds] for name in clients},
    }


def read(path: Path) -> dict[str, Line]:
    """Digest -> line; empty if there is no file. A last line that a killed driver half wrote does not count.

    Raises:
        CheckpointError: another line is no result.
    """
    lines = files.read(path).split(b"\n") if path.exists() else []
    found: dict[str, Line] = {}
    for number, text in enumerate(lines[:-1], start=1):
        try:
            line = json.loads(text)
            found[line["digest"]] = line
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path}, line {number}, is no result ({type(error).__name__}: {error}). Restore the file, or take the "
                f"line out: `fedlora experiment run` makes its run again."
            ) from error
    return found


def append(path: Path, line: Line) -> None:
    """Add a line, on disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("r+b" if path.exists() else "w+b") as file:
        whole = file.read().rpartition(b"\n")
        file.seek(len(whole[0]) + len(whole[1]))  # over what a killed driver half wrote
        file.truncate()
        file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def rewrite(path: Path, lines: Iterable[Line]) -> None:
    """The file with these lines alone, sorted by digest; nothing is touched if it has them so."""
    text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in sorted(lines, key=lambda one: one["digest"]))
    if (files.read(path) if path.exists() else b"") != text.encode():
        files.write(path, text)


def _planned(run: Planned) -> dict[str, Any]:
    facts = {"cell": dict(run.cell), "seed": run.seed, "value": run.value, "stage": run.stage}
    return {"digest": run.digest, "experiment": run.experiment, **facts}


def _whole(scores: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (scores or {}).items() if "/" not in name}


def _named(value: Any) -> Any:
    """A configuration with files by their names alone."""
    if isinstance(value, Mapping):
        return {key: _named(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_named(item) for item in value]
    return Path(value).name if isinstance(value, str) and os.path.isabs(value) else value


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _machine(manifest: Mapping[str, Any]) -> str:
    cuda = manifest["device"].startswith("cuda") and torch.cuda.is_available()
    device = torch.cuda.get_device_name() if cuda else manifest["device"]
    return f"{device}, {platform.machine()}, {manifest['threads']} threads"


# ---- frames ------------------------------------------------------------------------------------------------------

_PLAIN = ("digest", "stage", "method", "seed", "metric", "target", "rounds", "best_round")
# The columns of each run, in `results`.
COLUMNS: Mapping[str, Callable[[Line], Any]] = {
    **{name: itemgetter(name) for name in _PLAIN},
    **{name: parse_number(name).of for name in ("test, best", "test, last", "validation, best")},
    "MB up": lambda line: megabytes(line)[0],
    "MB down": lambda line: megabytes(line)[1],
    "seconds": lambda line: sum((line["seconds"] or {"": math.nan}).values()),
    "epsilon": lambda line: (line["privacy"] or {}).get("epsilon_planned"),
    **{name: itemgetter(name) for name in ("commit", "machine")},
}


def results(path: str | Path, *, by_round: bool = False) -> DataFrame:
    """Stored runs as a pandas frame.

    Args:
        path: a folder of results (`results`, the `--out` of `fedlora compare`), or one of its files. It includes the
            runs of a search (`--tune`), whose `stage` is "search": leave those out before you take means.
        by_round: a row for each run, round and score (on validation; "training loss" of each client), instead of one
            for each run.

    Returns:
        By run: its file, `COLUMNS`, its label on each axis of its experiment (an axis "method" has its labels, not the
        methods' names), every setting in which the runs differ ("train.learning_rate"), every score on the test set
        after the last round ("test loss"), and every client's own readout ("own readout of site-1"), if measured. By
        round: digest, method, seed, the labels, round, metric, client, value. Runs that failed are left out.

    Raises:
        CheckpointError: the path is the folder of one run, or a file there does not hold results. FileNotFoundError:
            there is nothing.

    Example:
        >>> runs = results("results")
        >>> runs.groupby("method")["seed"].count().to_dict()
        {'GLoRA': 1}
    """
    from pandas import DataFrame

    place = Path(path)
    if (place / "manifest.json").is_file():
        raise CheckpointError(
            f"{place} is the folder of one run: its scores are in summary.json, and those of each round in "
            f"metrics.jsonl. A frame needs many runs: give the --out of fedlora compare, or a folder of results."
        )
    files = sorted(place.glob("*.jsonl")) if place.is_dir() else [place]
    if not files or not files[0].exists():
        raise FileNotFoundError(f"{place} has no results (NAME.jsonl).")
    found = {digest: (file.stem, line) for file in files for digest, line in read(file).items() if "failed" not in line}
    if by_round:
        return DataFrame([row for _, line in found.values() for row in rounds_of(line)])
    settings = {digest: flat(line["config"]) for digest, (_, line) in found.items()}
    keys = dict.fromkeys(key for each in settings.values() for key in each)
    differing = [key for key in keys if len({repr(each.get(key)) for each in settings.values()}) > 1]
    return DataFrame([
        {"file": file, **{name: column(line) for name, column in COLUMNS.items()}, **line["cell"],
         **{key: settings[digest].get(key) for key in differing},
         **{f"test {name}": value for name, value in line["test"]["last"].items()},
         **{f"own readout of {client}": scores.get(line["metric"])
            for client, scores in line["clients_at_end"].items()}}
        for digest, (file, line) in found.items()
    ])  # fmt: skip


def rounds_of(line: Line) -> Iterator[dict[str, Any]]:
    """Each score on validation and each client's training loss, by round; NaN where there is no number."""
    of = {"digest": line["digest"], "method": line["method"], "seed": line["seed"], **line["cell"]}
    history = line["history"]
    for score, values in history["scores"].items():
        for t, value in zip(history["evaluated"], values, strict=True):
            yield {**of, "round": t, "metric": score, "client": None, "value": math.nan if value is None else value}
    for client, losses in history["losses"].items():
        for t, loss in enumerate(losses, start=1):
            if loss is not None:
                yield {**of, "round": t, "metric": "training loss", "client": client, "value": loss}


def megabytes(line: Line) -> tuple[float, float]:
    """What clients sent and got in all rounds, heads included; NaN for a private run, which does not report it."""
    count = line["bytes"]
    if not count:
        return math.nan, math.nan
    up = (count["up_adapter"] + count["up_heads"]) / 1e6
    return up, count["total"] / 1e6 - up
