"""Sends a run's numbers to TensorBoard, trackio, Weights & Biases or MLflow, besides metrics.jsonl, which is always
written.

Each is an optional library; if one named in `run.track` is not installed, the run is refused before it starts.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from fedlora.errors import ConfigError
from fedlora.runs.reading import flat

TrackerName = Literal["tensorboard", "trackio", "wandb", "mlflow"]
_PROJECT = "fedlora"


@dataclass(frozen=True)
class Called:
    """What a run is called at a tracker. group: the comparison or experiment that it belongs to, if any."""

    name: str
    group: str | None = None


class Tracker(Protocol):
    """Receives numbers."""

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        """One round's numbers, by name."""

    def close(self) -> None:
        """Called at the end."""


_MODULES: Mapping[TrackerName, str] = {
    "tensorboard": "torch.utils.tensorboard", "trackio": "trackio", "wandb": "wandb", "mlflow": "mlflow",
}  # fmt: skip


class TensorBoard:
    """Event files in the run folder's tensorboard/, on disk after each round.

    anew: remove existing event files, because a resumed run logs all its rounds again.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], *, anew: bool) -> None:
        writer = _library("tensorboard").SummaryWriter
        if anew:
            for old in (folder / "tensorboard").glob("events.out.tfevents.*"):
                old.unlink()
        self._writer: Any = writer(str(folder / "tensorboard"))
        self._writer.add_text("config", f"```json\n{json.dumps(config, indent=2)}\n```", 0)

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, round)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Logger:
    """trackio and wandb, which share init, log and finish. There a resumed run becomes a new one of the same name and
    logs all its rounds again; the old one ends where it was stopped."""

    def __init__(self, name: TrackerName, called: Called, config: Mapping[str, Any]) -> None:
        self._library: Any = _library(name)
        self._library.init(project=_PROJECT, name=called.name, group=called.group, config=dict(config))

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        self._library.log({"round": round, **numbers})

    def close(self) -> None:
        self._library.finish()


class MLflow:
    """An MLflow run, where MLFLOW_TRACKING_URI says; a group is an experiment there. As with `Logger`, a resumed run
    becomes a new one. Settings are its params, and whole in config.json; a character that MLflow refuses in names
    becomes _."""

    def __init__(self, called: Called, config: Mapping[str, Any]) -> None:
        self._library: Any = _library("mlflow")
        self._library.set_experiment(called.group or _PROJECT)
        self._library.start_run(run_name=called.name)
        params = [(key, str(value)) for key, value in flat(config).items()]
        short = [(key, value) for key, value in params if len(value) <= _PARAM]
        for k in range(0, len(short), _PARAMS):
            self._library.log_params(dict(short[k : k + _PARAMS]))
        self._library.log_dict(dict(config), "config.json")

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        self._library.log_metrics({_REFUSED.sub("_", name): x for name, x in numbers.items()}, step=round)

    def close(self) -> None:
        self._library.end_run()


_PARAM, _PARAMS = 500, 100  # MLflow servers take values of so many letters, and so many at once
_REFUSED = re.compile(r"[^\w\-. :/]", re.ASCII)


def check_trackers(names: Sequence[TrackerName]) -> None:
    """Raise `ConfigError` if one of the libraries is missing, before a run has a folder."""
    for name in names:
        _library(name)


def make_tracker(
    name: TrackerName, folder: Path, config: Mapping[str, Any], *, anew: bool = False, called: Called | None = None
) -> Tracker:
    """The tracker of that name. anew: the run is resumed and will log all its rounds again. called: by default the
    name of its folder.

    Raises `ConfigError` if its library is missing.
    """
    called = called or Called(folder.name)
    if name == "tensorboard":
        return TensorBoard(folder, config, anew=anew)
    return MLflow(called, config) if name == "mlflow" else Logger(name, called, config)


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """A metrics.jsonl line as numbers for a tracker: metrics/NAME with all details, loss (the round's) and loss/CLIENT,
    seconds/PHASE, bytes, server_rank and padded_error; with a robust rule change/CLIENT (its norm) and
    weight_after/CLIENT. NaN is left out."""
    found = {f"metrics/{name}": value for name, value in line["metrics"].items()}
    found |= {f"loss/{client}": loss for client, loss in line["losses"].items()}
    found |= {f"seconds/{phase}": spent for phase, spent in line["seconds"].items()}
    found |= {
        "loss": line.get("loss"),
        "bytes": line["bytes"].get("total"),
        "server_rank": line["server_rank"],
        "padded_error": line["padded_error"],
    }
    for client, one in (line.get("defence") or {"clients": {}})["clients"].items():
        found |= {f"change/{client}": one["norm"], f"weight_after/{client}": one["after"]}
    return _finite(found)


def numbers_of_test(scores: Mapping[str, float], *, best: bool) -> dict[str, float]:
    """A state's scores on the test set: test/NAME for the last round, test_best/NAME for the best one."""
    return _finite({f"{'test_best' if best else 'test'}/{name}": value for name, value in scores.items()})


def _finite(found: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}


def _library(name: TrackerName) -> Any:
    try:
        return importlib.import_module(_MODULES[name])
    except ImportError as error:
        raise ConfigError(
            f"run.track names {name}, which is not installed: pip install {name}, or leave it out."
        ) from error
