"""Scores over seeds in words and as records: what `fedlora experiment table` and `fedlora compare` both print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedlora.cli.formats import Sheet
from fedlora.experiments.digits import difference_in_words, shown
from fedlora.experiments.plan import at_the_edge
from fedlora.experiments.scores import parse_number
from fedlora.experiments.spec import Experiment
from fedlora.experiments.tables import CellScore, Difference


def score_sheet(title: str, scores: Mapping[str, Sequence[CellScore]], axes: Sequence[str]) -> Sheet:
    """A row a cell. scores: heading -> the cells with that number; the first one's decide what n is."""
    first = next(iter(scores.values()))
    tuned = any(cell.tuned is not None for cell in first)
    columns = [*axes, "n", *(["tuned"] if tuned else []), *scores]
    rows = []
    for k, cell in enumerate(first):
        n = str(len(cell.scores)) if len(cell.scores) == cell.planned else f"{len(cell.scores)} of {cell.planned}"
        value = [] if not tuned else ["" if cell.tuned is None else shown(cell.tuned)]
        rows.append([*cell.cell.values(), n, *value, *(_spread(cells[k]) for cells in scores.values())])
    return Sheet(title, columns, rows, names=len(axes))


def difference_sheet(title: str, differences: Sequence[Difference]) -> Sheet:
    """A row a difference, with its 95 % interval."""
    rows = [
        [
            d.other, *([", ".join(d.where.values())] if d.where else []), *difference_in_words(d.mean, d.low, d.high),
            str(d.pairs), d.verdict,
        ]
        for d in differences
    ]  # fmt: skip
    where = ["where"] if any(d.where for d in differences) else []
    return Sheet(title, ["", *where, "difference", "95 % interval", "pairs", "verdict"], rows, names=1 + len(where))


def records(which: str, cells: Sequence[CellScore], differences: Sequence[Difference], axis: str) -> list[Any]:
    """A record a cell, with its difference to the reference where there is one. metric: which number; score: of what,
    as "accuracy"."""
    found = []
    for cell in cells:
        where = {name: label for name, label in cell.cell.items() if name != axis}
        ours = [d for d in differences if d.other == cell.cell[axis] and dict(d.where) == where]
        record: dict[str, Any] = {
            **cell.cell, "metric": which, "score": cell.metric, "n": len(cell.scores), "planned": cell.planned,
            "mean": cell.mean, "sd": cell.spread, "tuned": cell.tuned, "reference": None, "pairs": None,
            "difference": None, "low": None, "high": None, "p": None, "decided": None,
        }  # fmt: skip
        for d in ours:
            record |= {
                "reference": d.reference, "pairs": d.pairs, "difference": d.mean,
                "low": d.interval[0] if d.interval else None, "high": d.interval[1] if d.interval else None,
                "p": d.p, "decided": d.decided,
            }  # fmt: skip
        found.append(record)
    return found


def cell_value(cell: CellScore) -> dict[str, Any]:
    """A cell for JSON."""
    return {
        "cell": dict(cell.cell), "scores": dict(cell.scores), "mean": cell.mean, "spread": cell.spread,
        "planned": cell.planned, "tuned": cell.tuned, "score": cell.metric, "without_number": list(cell.none),
    }  # fmt: skip


def direction(which: str, cells: Sequence[CellScore]) -> list[str]:
    """A line where less is better, for who reads an order or the sign of a difference."""
    metrics = dict.fromkeys(cell.metric for cell in cells if cell.metric is not None)
    less = [metric for metric in metrics if parse_number(which).smaller_is_better(metric)]
    if not less:
        return []
    where = "" if len(less) == len(metrics) else f" of {' and '.join(less)}"
    return [f"Smaller is better{where}: a negative difference is ahead of the reference."]


def widen_lines(experiment: Experiment, profile: str, cells: Sequence[CellScore]) -> list[str]:
    """A line for each cell whose searched value is the largest or the smallest of those tried."""
    said = []
    for cell in cells:
        edge = at_the_edge(experiment, profile, cell.tuned)
        if edge is not None and cell.tuned is not None and experiment.tune is not None:
            where = f"{', '.join(cell.cell.values())}: {experiment.tune.key} = {shown(cell.tuned)}"
            said.append(f"{where} is the {edge} tried: widen the grid.")
    return said


def _spread(cell: CellScore) -> str:
    """Mean and standard deviation."""
    return cell.words()
