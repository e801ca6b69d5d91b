"""Results of an experiment that nobody ran."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedlora.experiments.plan import PlannedRun
from fedlora.experiments.result import History, Result, short_config
from fedlora.experiments.store import gather
from fedlora.runs.config import RunConfig
from fedlora.runs.folder import plain


def stored(raw: Mapping[str, Any]) -> Result:
    """What `whole` gives as the value that is stored: its history by columns, its configuration in short."""
    lines = plain(raw["history"])
    config = _short(json.dumps(raw["config"]))
    told = {**plain(raw), "config": config, "history": History.of(lines), "rounds": len(lines)}
    return Result.model_validate(told)


@functools.cache
def _short(config: str) -> Any:
    """Once for the runs that tests write again and again with other scores."""
    return short_config(RunConfig.model_validate_json(config))


def bare(digest: str, history: Sequence[Mapping[str, Any]] = (), **told: Any) -> Result:
    """A result of which only this is known. history: lines with "round" and "metrics"."""
    of = {
        "method": "glora", "metric": "accuracy", "target": "server", "test": {}, "commit": None,
        "rounds": len(history), "config": {"model": {"path": "demo"}, "data": {"train": "demo"}},
        "machine": {"device": "cpu", "architecture": "x86_64"},
    }  # fmt: skip
    return Result.model_validate({**of, "digest": digest, "history": History.of(history), **told})


def write_result(folder: Path, raw: Mapping[str, Any], name: str = "made") -> None:
    gather(folder, name, stored(raw))


def whole(run: PlannedRun, metric: str, scores: Mapping[str, float]) -> dict[str, Any]:
    """A result of the run with all that a result has: these scores on each set in each round."""
    rounds = range(1, run.config.run.rounds + 1)
    return {
        "digest": run.digest, "config": json.loads(run.config.canonical()), "metric": metric, "target": "server",
        "method": run.config.method.name, "wall_seconds": 40.0,
        "history": [{"round": k, "metrics": dict(scores), "losses": {"a": 1.0}} for k in rounds],
        "best_round": len(rounds),
        "test": {"best": dict(scores), "last": dict(scores)},
        "probes": {"best": {}, "last": {}}, "clients_at_end": {}, "categories": {}, "ranks": {"a": 8}, "bytes": {},
        "commit": {"id": "c" * 40, "clean": True},
        "machine": {"device": "cpu", "architecture": "x86_64", "cpus": 2, "threads": 1},
        **({"files": dict(run.files)} if run.files else {}),
    }  # fmt: skip
