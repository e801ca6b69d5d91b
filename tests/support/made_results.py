"""Results of an experiment that nobody ran: every run of a profile, with losses by a rule."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedlora.experiments.grid import Grid
from fedlora.experiments.plan import PlannedRun
from fedlora.experiments.result import History, Result, short_config
from fedlora.experiments.spec import Experiment
from fedlora.experiments.store import as_lines, gather, read_results, read_results_of
from fedlora.runs.config import RunConfig
from fedlora.runs.folder import plain

ERRORS = {"factor averages": 0.6, "GLoRA 0.25": 0.5}  # label -> relative error of its mean update, on seed 0
Rule = Callable[[str, str, int], float]  # label, set-up, seed -> log-loss on the test set


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


def by_effects(effects: Mapping[tuple[str, str], float], noise: float) -> Rule:
    """0.6, a seed's own level, an effect of (label, set-up), and noise of each run: normal, of that deviation."""

    def loss(label: str, setup: str, seed: int) -> float:
        level = _drawn(f"{setup} {seed}", 0.6, 0.05)
        return level + effects.get((label, setup), 0.0) + _drawn(f"{label} {setup} {seed}", 0, noise)

    return loss


@functools.cache
def _drawn(seed: str, mean: float, deviation: float) -> float:
    return random.Random(seed).gauss(mean, deviation)


def write_runs(folder: Path, experiment: Experiment, profile: str, loss: Rule, *, search: bool = False) -> int:
    """The profile's runs as files (of its search with `search`). Returns how many trainings these are."""
    runs = Grid(experiment, profile).searches if search else Grid(experiment, profile, read_results(folder)).runs
    made: dict[str, dict[str, object]] = {}
    for run in runs:
        made[run.digest] = _result(experiment, run, loss, made.get(run.digest, {}))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{experiment.name}.jsonl"
    before = dict(read_results_of(path)) if path.is_file() else {}
    path.write_text(as_lines({**before, **{digest: stored(raw) for digest, raw in made.items()}}))  # at once, unlocked
    return len(made)


def _result(experiment: Experiment, run: PlannedRun, loss: Rule, before: Mapping[str, object]) -> dict[str, object]:
    setup = next((label for axis, label in run.cell.items() if axis != experiment.rows), "")

    def scores(label: str) -> dict[str, float]:
        x = loss(label, setup, run.seed) + abs((run.tuned or 1e-3) - 1e-3) * (10 if run.searching else 0)
        return {"loss": x, "accuracy": 1.3 - x}

    mine = scores(run.cell[experiment.rows])
    mergers = dict(before.get("mergers", {}))  # type: ignore[call-overload]
    for label, merger in run.mergers.items():
        mergers[label] = {"merger": dict(merger), "test": scores(label), "validation": scores(label), "norm": 1.0}
        if "name" in merger:
            mergers[label]["error"] = ERRORS.get(label, 0.0) + 0.01 * run.seed
    rounds, every, method = run.config.run.rounds, run.config.evaluate.every, run.config.method.name
    return whole(run, "loss", mine) | {
        "history": [
            {"round": k, "losses": {"a": 1.0},
             "metrics": {"loss": mine["loss"] + 0.1 * (1 / k - 1 / rounds)} if k % every == 0 else {}}
            for k in range(1, rounds + 1)
        ],
        "confusion": {"classes": ["negative", "positive"]}, "padded_error": 0.2 + 0.01 * run.seed,
        "gauge_drift": {"padded-average": 1.0 + 0.01 * run.seed, method: 3e-15} | (
            {method: 1.0 + 0.01 * run.seed} if method == "padded-average" else {}),
        **({"mergers": mergers} if mergers else {}),
    }  # fmt: skip
