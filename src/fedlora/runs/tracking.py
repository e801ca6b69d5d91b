"""Sends a run's numbers to TensorBoard, trackio, Weights & Biases or MLflow, besides metrics.jsonl, which is always
written.

Each is an optional library; if one named in `run.report_to` is not installed, the run is refused before it starts. A
resumed run is a new one of the same name there, and gets all rounds again; in TensorBoard it replaces the old one.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedlora.errors import ConfigError
from fedlora.privacy.releases import RELEASED
from fedlora.runs.reading import flat

TrackerName = Literal["tensorboard", "trackio", "wandb", "mlflow"]
_PROJECT = "fedlora"
_PARAM, _PARAMS = 500, 100  # MLflow servers take values of so many letters, and so many at once
_REFUSED = re.compile(r"[^\w\-. :/]", re.ASCII)  # by MLflow, in names
Log = Callable[[int, Mapping[str, float]], None]  # a round, and its numbers by name


@dataclass(frozen=True)
class Called:
    """What a run is called at a tracker. group: the comparison or experiment that it belongs to, if any."""

    name: str
    group: str | None = None


def check_trackers(names: Sequence[TrackerName]) -> None:
    """Raise `ConfigError` if one of the libraries is missing, before a run has a folder."""
    for name in names:
        _library(name)


class Trackers:
    """The trackers of one run. After a resume they get all earlier rounds again.

    names: run.report_to. config: for each. anew: the run is resumed. called: by default the name of its folder. lines:
    of the rounds before.
    """

    def __init__(
        self, names: Sequence[TrackerName], folder: Path, config: Mapping[str, Any], lines: Sequence[Mapping[str, Any]],
        *, anew: bool, called: Called | None = None,
    ) -> None:  # fmt: skip
        self._each = [_begun(name, called or Called(folder.name), config, folder, anew) for name in names]
        for line in lines:
            self.log(line)

    def log(self, line: Mapping[str, Any]) -> None:
        """Report a round."""
        for log, _ in self._each:
            log(line["round"], numbers(line))

    def close(self, tests: Mapping[str, tuple[int, Mapping[str, float]]]) -> None:
        """tests: for each tested state, "last" or "best", its round and its scores on the test set: test/NAME and
        test_best/NAME."""
        for log, end in self._each:
            for name, (round, scores) in tests.items():
                word = "test_best" if name == "best" else "test"
                log(round, _finite({f"{word}/{score}": value for score, value in scores.items()}))
            end()


def _begun(
    name: TrackerName, called: Called, config: Mapping[str, Any], folder: Path, anew: bool
) -> tuple[Log, Callable[[], None]]:
    """A run begun there: what logs a round's numbers, and what ends it.

    TensorBoard has event files in the run folder's tensorboard/, on disk after each round. MLflow's run is where
    MLFLOW_TRACKING_URI says; a group is an experiment there, and short settings are its params.
    """
    library = _library(name)
    if name == "tensorboard":
        place = folder / "tensorboard"
        for old in place.glob("events.out.tfevents.*") if anew else ():
            old.unlink()
        writer = library.SummaryWriter(str(place))
        writer.add_text("config", f"```json\n{json.dumps(config, indent=2)}\n```", 0)

        def log(round: int, found: Mapping[str, float]) -> None:
            for tag, value in found.items():
                writer.add_scalar(tag, value, round)
            writer.flush()

        return log, writer.close
    if name == "mlflow":
        library.set_experiment(called.group or _PROJECT)
        library.start_run(run_name=called.name)
        short = [(key, str(value)) for key, value in flat(config).items() if len(str(value)) <= _PARAM]
        for k in range(0, len(short), _PARAMS):
            library.log_params(dict(short[k : k + _PARAMS]))
        library.log_dict(dict(config), "config.json")
        return lambda round, found: library.log_metrics(
            {_REFUSED.sub("_", tag): value for tag, value in found.items()}, step=round
        ), library.end_run
    library.init(project=_PROJECT, name=called.name, group=called.group, config=dict(config))
    return lambda round, found: library.log({"round": round, **found}), library.finish


# A table of a line -> the word before its names at a tracker
_TABLES = {
    "metrics": "metrics", "site_mean": "sites", "losses": "loss", "weights": "weight", "seconds": "seconds",
}  # fmt: skip


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """A round's line, of metrics.jsonl or of a federation's rounds.jsonl, as numbers for a tracker, without NaN; of a
    private round what may be released.

    metrics/NAME with all details, loss (the round's) and loss/CLIENT, weight/CLIENT, seconds or seconds/PHASE, bytes,
    server_rank, padded_error; of a federation sites/NAME (the sites' weighted mean), site/SITE/NAME; with a robust
    rule change/CLIENT (a change's norm) and weight_after/CLIENT; of a private round privacy/epsilon and
    privacy/epsilon_planned.
    """
    found: dict[str, Any] = {key: line.get(key) for key in ("loss", "seconds", "server_rank", "padded_error")}
    found |= {"bytes": (line.get("bytes") or {}).get("total")}
    found |= {"clients": len(line["weights"])} if "weights" in line else {}
    tables = {word: line.get(key) for key, word in _TABLES.items()}
    tables |= {f"site/{site}": scores for site, scores in (line.get("site_metrics") or {}).items()}
    for word, table in tables.items():
        found |= {f"{word}/{name}": value for name, value in table.items()} if isinstance(table, Mapping) else {}
    for client, one in ((line.get("robust") or {}).get("clients") or {}).items():
        found |= {f"change/{client}": one["norm"], f"weight_after/{client}": one["coefficient"]}
    spent = line.get("privacy")
    if spent is None:
        return _finite(found)
    found |= {f"privacy/{name}": spent[name] for name in ("epsilon", "epsilon_planned")}
    return _finite({name: value for name, value in found.items() if name.partition("/")[0] in RELEASED["tracker"]})


def _finite(found: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(v) for name, v in found.items() if isinstance(v, int | float) and math.isfinite(v)}


def _library(name: TrackerName) -> Any:
    try:
        return importlib.import_module("torch.utils.tensorboard" if name == "tensorboard" else name)
    except ImportError as error:
        raise ConfigError(
            f"run.report_to names {name}, which is not installed: pip install {name}, or leave it out."
        ) from error
