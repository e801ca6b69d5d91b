"""Results as pandas frames. For a new column, add a line to `COLUMNS`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlora.errors import CheckpointError
from fedlora.experiments.results import read
from fedlora.experiments.scores import Line, parse_number
from fedlora.runs.reading import flat

if TYPE_CHECKING:
    from pandas import DataFrame

# The columns of each run, in `results`.
COLUMNS: Mapping[str, Callable[[Line], Any]] = {
    "digest": lambda line: line["digest"],
    "stage": lambda line: line["stage"],
    "method": lambda line: line["method"],
    "seed": lambda line: line["seed"],
    "metric": lambda line: line["metric"],
    "target": lambda line: line["target"],
    "rounds": lambda line: line["rounds"],
    "best_round": lambda line: line["best_round"],
    **{name: parse_number(name).of for name in ("test, best", "test, last", "validation, best")},
    "MB up": lambda line: megabytes(line)[0],
    "MB down": lambda line: megabytes(line)[1],
    "seconds": lambda line: sum((line["seconds"] or {"": math.nan}).values()),
    "epsilon": lambda line: (line["privacy"] or {}).get("epsilon_planned"),
    "commit": lambda line: line["commit"],
    "machine": lambda line: line["machine"],
}


def results(path: str | Path, *, by_round: bool = False) -> DataFrame:
    """Stored runs as a pandas frame.

    Args:
        path: a folder of results (`results`, the `--out` of `fedlora compare`), or one of its files. It includes the
            runs of a search (`--tune`), whose `stage` is "search": leave those out before you take means.
        by_round: a row for each run, round and score (on validation; "training loss" of each client), instead of one
            for each run.

    Returns:
        By run: its file, its label on each axis of its experiment, `COLUMNS`, every setting in which the runs differ
        ("train.learning_rate"), every score on the test set after the last round ("test loss"), and every client's own
        readout ("own readout of site-1"), if measured. By round: digest, method, seed, round, metric, client, value;
        "test/loss" is of runs with evaluate.test_along. Runs that failed are left out.

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
    if not files or not files[0].exists():
        raise FileNotFoundError(f"{place} has no results (NAME.jsonl).")
    found = {digest: (file.stem, line) for file in files for digest, line in read(file).items() if "failed" not in line}
    if by_round:
        return DataFrame([row for _, line in found.values() for row in rounds_of(line)])
    settings = {digest: flat(line["config"]) for digest, (_, line) in found.items()}
    keys = dict.fromkeys(key for each in settings.values() for key in each)
    differing = [key for key in keys if len({repr(each.get(key)) for each in settings.values()}) > 1]
    return DataFrame([
        {"file": file, **line["cell"], **{name: column(line) for name, column in COLUMNS.items()},
         **{key: settings[digest].get(key) for key in differing if key not in ("run.seed", "method.name")},
         **{f"test {name}": value for name, value in line["test"]["last"].items()},
         **{f"own readout of {client}": scores.get(line["metric"])
            for client, scores in line["clients_at_end"].items()}}
        for digest, (file, line) in found.items()
    ])  # fmt: skip


def rounds_of(line: Line) -> Iterator[dict[str, Any]]:
    """Each score on validation and each client's training loss, by round; NaN where there is no number."""
    of = {"digest": line["digest"], "method": line["method"], "seed": line["seed"]}
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
    told = line["bytes"] or {}
    up = (told["up_adapter"] + told["up_heads"]) / 1e6 if told else math.nan
    return up, (told["total"] / 1e6 - up if told else math.nan)
