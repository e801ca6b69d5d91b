"""Scores over seeds in all formats, for `fedlora experiment table` and `fedlora compare`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedlora.cli.formats import Format, Printed, show
from fedlora.cli.screen import notes
from fedlora.experiments.grid import Grid
from fedlora.experiments.lost import lost_lines, lost_of
from fedlora.experiments.scores import parse_number
from fedlora.experiments.table_forms import Table
from fedlora.experiments.tables import CellScore, Difference, paired, score_cells

_SIMULATIONS = (
    "Private runs of an experiment are simulations, each with a population and an epsilon of its own. None of this is "
    "an account of anybody's data."
)


def show_scores(
    grid: Grid, number: str, tables: Sequence[Table], form: Format, *, first: Sequence[str] = (),
    beside: Sequence[str] = (), more: Mapping[str, Any] | None = None, out: Path | None = None,
) -> None:  # fmt: skip
    """Print a number's tables, and the notes that a reader needs below them; what is missing comes first.

    Args:
        number: the number to compare; "" for the experiment's. first, beside: lines printed before and after the
            others. more: for JSON, besides what every table has. out: a file, instead of the screen.
    """
    which, cells = grid.which(number), score_cells(grid, number)
    to_target = parse_number(which).where == "rounds"
    less = {cell.less for cell in cells if cell.metric is not None} or {False}
    reference = grid.experiment.reference
    differences = paired(cells, grid.rows, reference) if reference else []
    results = {run.digest: result for run, result in grid.used}.values()
    loud = [f"UNDER ATTACK, on purpose: {what}. Do not use these results." for what in grid.attacks]
    if any(result.privacy for result in results):
        loud.append(_SIMULATIONS)
    missing = [*first, *lost_lines(grid)]
    below = [line for table in tables for line in table.below]
    remarks = dict.fromkeys([*loud, *missing, *below, *direction(which, cells, bool(differences)), *beside])
    value = {
        "metric": which, "score": " and ".join(grid.metrics) or None,
        "smaller_is_better": less.pop() if len(less) == 1 else None,
        "reference": reference,
        "cells": [cell_value(cell) | _median(cell, to_target) for cell in cells],
        "differences": [_difference(d) for d in differences], "attacks": grid.attacks, "not_for_use": " ".join(loud),
        "missing": missing, "failed": [vars(one) for one in lost_of(grid) if one.why],
        **(more or {}),
    }  # fmt: skip
    aloud = {"not_for_use": " ".join(loud)} if loud else {}
    lines = [{**line, **aloud} for line in _records(which, cells, differences, grid.rows, to_target)]
    show(Printed(tables, lines, value, [*remarks]), form, out)
    if form is Format.json:  # the JSON is for a program; this is for people
        notes.warn(*missing)


def _median(cell: CellScore, to_target: bool) -> dict[str, Any]:
    """Of rounds to a target; None if more than half never got there."""
    return {"median": cell.median} if to_target else {}


def _records(
    which: str, cells: Sequence[CellScore], differences: Sequence[Difference], axis: str, to_target: bool
) -> list[Any]:
    """One record per cell, with its difference to the reference, if there is one. metric: which number; score: its
    metric, such as "accuracy"."""
    found = []
    for cell in cells:
        where = {name: label for name, label in cell.cell.items() if name != axis}
        ours = [d for d in differences if d.other == cell.cell[axis] and dict(d.where) == where]
        told = _difference(ours[0]) if ours else {}
        gap = {key: told.get(key) for key in ("reference", "pairs", "low", "high", "p", "decided")}
        found.append({
            **cell.cell, "metric": which, "score": cell.metric, "n": len(cell.scores), "planned": cell.planned,
            "mean": cell.mean, "sd": cell.spread, "tuned": cell.tuned, **gap, "difference": told.get("mean"),
            **_median(cell, to_target),
        })  # fmt: skip
    return found


def cell_value(cell: CellScore) -> dict[str, Any]:
    """A cell for JSON."""
    return {
        "cell": dict(cell.cell), "scores": dict(cell.scores), "n": len(cell.scores), "mean": cell.mean,
        "sd": cell.spread, "planned": cell.planned, "tuned": cell.tuned, "score": cell.metric,
        "without_number": list(cell.none),
    }  # fmt: skip


def _difference(d: Difference) -> dict[str, Any]:
    """A difference for JSON; if all gaps are equal, it has no interval."""
    low, high = d.interval or (None, None)
    return {**vars(d), "low": low, "high": high, "decided": d.decided}


def direction(which: str, cells: Sequence[CellScore], compared: bool) -> list[str]:
    """A line if smaller is better, for readers of the order or of a difference's sign. compared: there are some."""
    metrics = dict.fromkeys(cell.metric for cell in cells if cell.metric is not None)
    less = [metric for metric in metrics if parse_number(which).smaller_is_better(metric)]
    if not less:
        return []
    where = "" if len(less) == len(metrics) else f" of {' and '.join(less)}"
    return [f"Smaller is better{where}{': a negative difference is ahead of the reference' * compared}."]
