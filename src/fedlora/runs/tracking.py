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
from fedlora.privacy.releases import RELEASED
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


class Trackers:
    """The trackers of one run. After a resume they get all earlier rounds again.

    names: run.track. config: for each. anew, called: as in `make_tracker`. lines: of the rounds before.
    """

    def __init__(
        self, names: Sequence[TrackerName], folder: Path, config: Mapping[str, Any], lines: Sequence[Mapping[str, Any]],
        *, anew: bool, called: Called | None = None,
    ) -> None:  # fmt: skip
        self._trackers = [make_tracker(name, folder, config, anew=anew, called=called) for name in names]
        for line in lines:
            self.log(line)

    def log(self, line: Mapping[str, Any]) -> None:
        """Report a round."""
        for tracker in self._trackers:
            tracker.log(line["round"], numbers(line))

    def close(self, tests: Mapping[str, tuple[int, Mapping[str, float]]]) -> None:
        """tests: for each tested state, "last" or "best", its round and its scores on the test set."""
        for tracker in self._trackers:
            for name, (round, scores) in tests.items():
                tracker.log(round, numbers_of_test(scores, best=name == "best"))
            tracker.close()


# A table of a line -> the word before its names at a tracker
_TABLES = {
    "metrics": "metrics", "site_mean": "sites", "losses": "loss", "weights": "weight", "norms": "norm",
    "seconds": "seconds",
}  # fmt: skip


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """A round's line, of metrics.jsonl or of a federation's rounds.jsonl, as numbers for a tracker, without NaN; of a
    private round what may be released.

    metrics/NAME with all details, loss (the round's) and loss/CLIENT, weight/CLIENT, seconds or seconds/PHASE, bytes,
    server_rank, padded_error; of a federation sites/NAME (the sites' weighted mean), site/SITE/NAME, norm/CLIENT; with
    a robust rule change/CLIENT (a change's norm) and weight_after/CLIENT; of a private round privacy/epsilon and
    privacy/epsilon_planned.
    """
    found: dict[str, Any] = {key: line.get(key) for key in ("loss", "seconds", "server_rank", "padded_error")}
    found |= {"bytes": (line.get("bytes") or {}).get("total")}
    found |= {"clients": len(line["weights"])} if "weights" in line else {}
    tables = {word: line.get(key) for key, word in _TABLES.items()}
    tables |= {f"site/{site}": scores for site, scores in (line.get("site_metrics") or {}).items()}
    for word, table in tables.items():
        found |= {f"{word}/{name}": value for name, value in table.items()} if isinstance(table, Mapping) else {}
    for client, one in ((line.get("defence") or {}).get("clients") or {}).items():
        found |= {f"change/{client}": one["norm"], f"weight_after/{client}": one["coefficient"]}
    spent = line.get("privacy")
    if spent is None:
        return _finite(found)
    found |= {f"privacy/{name}": spent[name] for name in ("epsilon", "epsilon_planned")}
    return _finite({name: value for name, value in found.items() if name.partition("/")[0] in RELEASED["tracker"]})


def numbers_of_test(scores: Mapping[str, float], *, best: bool) -> dict[str, float]:
    """A state's scores on the test set: test/NAME for the last round, test_best/NAME for the best one."""
    return _finite({f"{'test_best' if best else 'test'}/{name}": value for name, value in scores.items()})


def _finite(found: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(v) for name, v in found.items() if isinstance(v, int | float) and math.isfinite(v)}


def _library(name: TrackerName) -> Any:
    try:
        return importlib.import_module(_MODULES[name])
    except ImportError as error:
        raise ConfigError(
            f"run.track names {name}, which is not installed: pip install {name}, or leave it out."
        ) from error
