"""Results as pandas frames. For a new column, add a line to `COLUMNS`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fedlora.errors import CheckpointError
from fedlora.experiments.result import Result
from fedlora.experiments.store import read_results, read_results_of
from fedlora.runs.reading import flat

if TYPE_CHECKING:
    from pandas import DataFrame

# The columns of each run, in `results`.
COLUMNS: Mapping[str, Callable[[Result], object]] = {
    "digest": lambda r: r.digest,
    "method": lambda r: r.method,
    "seed": lambda r: r.settings.run.seed,
    "metric": lambda r: r.metric,
    "target": lambda r: r.target,
    "rounds": lambda r: r.rounds,
    "best_round": lambda r: r.best_round,
    "test, best": lambda r: r.score("test, best"),
    "test, last": lambda r: r.score("test, last"),
    "validation, best": lambda r: r.score("validation, best"),
    "MB up": lambda r: r.megabytes_up,
    "MB down": lambda r: r.megabytes_down,
    "seconds": lambda r: r.wall_seconds,
    "seconds of training": lambda r: r.seconds.get("train"),
    "epsilon": lambda r: r.privacy.epsilon_planned if r.privacy else None,
    "commit": lambda r: "unknown" if r.commit is None else r.commit.id[:12] + ("" if r.commit.clean else "+dirty"),
    "machine": lambda r: r.machine.words,
}


def results(path: str | Path, *, by_round: bool = False) -> DataFrame:
    """Stored runs as a pandas frame.

    Args:
        path: a folder of results (`results`, the `--out` of `fedlora compare`), or one of its files. It includes the
            runs of a search (`--tune`), on their own seeds: leave those out before you take means.
        by_round: a row for each run, round and score (on validation; "training loss" of each client), instead of one
            for each run.

    Returns:
        By run: its file, `COLUMNS`, every setting in which the runs differ ("train.lr"), every score on the test set
        after the last round ("test loss"), and every client's own readout ("own readout of site-1"), if measured. By
        round: digest, method, seed, round, metric, client, value; "test/loss" is of runs with evaluate.test_along.

    Raises:
        CheckpointError: the path is the folder of one run, or a file there does not hold results. FileNotFoundError:
            there is nothing.

    Example:
        >>> runs = results("results")
        >>> runs.groupby("method")["seed"].count().to_dict()
        {'glora': 1}
    """
    from pandas import DataFrame

    place = Path(path)
    if (place / "manifest.json").is_file():
        raise CheckpointError(
            f"{place} is the folder of one run: its scores are in summary.json, and those of each round in "
            f"metrics.jsonl. A frame needs many runs: give the --out of fedlora compare, or a folder of results."
        )
    files = sorted(place.glob("*.jsonl")) if place.is_dir() else [place]
    if not files:
        raise FileNotFoundError(f"{place} has no results (NAME.jsonl).")
    if place.is_dir():
        read_results(place)  # rejects two files that contradict each other about one run
    found = [*{d: (file.stem, result) for file in files for d, result in read_results_of(file).items()}.values()]
    if by_round:
        return DataFrame([row for _, result in found for row in rounds_of(result)])
    settings = [flat(result.settings.model_dump(mode="json")) for _, result in found]
    differing = {key for one in settings for key in one if any(one[key] != other.get(key) for other in settings)}
    return DataFrame(
        [
            {"file": file, **{name: column(result) for name, column in COLUMNS.items()},
             **{key: value for key, value in told.items() if key in differing - {"run.seed", "method.name"}},
             **{f"test {name}": value for name, value in result.test.last.items()},
             **{f"own readout of {client}": scores.get(result.metric)
                for client, scores in result.clients_at_end.items()}}
            for (file, result), told in zip(found, settings, strict=True)
        ]
    )  # fmt: skip


def rounds_of(result: Result) -> Iterator[dict[str, object]]:
    """Each score on validation and each client's training loss, by round; NaN if it diverged."""
    of = {"digest": result.digest, "method": result.method, "seed": result.settings.run.seed}
    for score in result.history.metrics:
        for t, value in result.history.curve(score).items():
            yield {**of, "round": t, "metric": score, "client": None, "value": value}
    for t in range(1, result.rounds + 1):
        for client, loss in result.history.losses_of(t).items():
            value = math.nan if loss is None else loss
            yield {**of, "round": t, "metric": "training loss", "client": client, "value": value}
