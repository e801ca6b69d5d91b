"""Facts that scores depend on but do not show: whose model was measured, and choices at the edge of their grid."""

from __future__ import annotations

from collections.abc import Sequence

from fedlora.experiments.digits import shown
from fedlora.experiments.grid import Grid
from fedlora.experiments.result import Result
from fedlora.experiments.scores import parse_number
from fedlora.experiments.tables import CellScore, of_two_units, without_number


def notes(grid: Grid, number: str, *, cells: Sequence[CellScore] = ()) -> list[str]:
    """One line for each thing that a reader of these runs' numbers must know.

    Args:
        number: its name, "" for the compared one. cells: those with the number, for seeds that lack it.
    """
    which = grid.which(number)
    return [
        *without_number(cells),
        *of_two_units(cells, grid.rows),
        *(_whose_models(grid, which) if parse_number(which).of_target else []),
        *_edges(grid),
    ]


def _whose_models(grid: Grid, which: str) -> list[str]:
    """A line if scores are from clients' own models, because they appear beside those of a server's model."""
    labels: dict[str, dict[str, None]] = {}
    for run, result in grid.used:
        labels.setdefault(_whose(result, which), {})[run.cell[grid.rows]] = None
    if {*labels} <= {_OF_SERVER}:
        return []
    if len(labels) == 1:
        return [f"Every number is {next(iter(labels))}, not {_OF_SERVER}."]
    each = [f"{', '.join(mine)}: {score}." for score, mine in labels.items() if score != _OF_SERVER]
    return [" ".join([*each, *([f"The others: {_OF_SERVER}."] if _OF_SERVER in labels else [])])]


_OF_SERVER = "the score of the server's model"


def _whose(result: Result, which: str) -> str:
    if result.target != "clients":
        return _OF_SERVER
    data = ", each on its client's own data" if result.on_own_data(which) else " on the same data"
    return f"the mean score of the clients' own models{data}"


def _edges(grid: Grid) -> list[str]:
    """A line for each searched value that ties with others, or is the largest or smallest tried."""
    tune = grid.experiment.tune
    if tune is None:
        return []
    over = [axis for axis in tune.over if len({run.cell[axis] for run, _ in grid.used}) > 1]
    found: dict[tuple[str, str], list[str]] = {}
    for where, run in {tuple(run.cell[axis] for axis in tune.over): run for run, _ in grid.used}.items():
        made = grid.choice(run.cell)
        label = ", ".join(name for axis, name in zip(tune.over, where, strict=True) if axis in over) or "all"
        if made.level:
            what = f"{', '.join(map(shown, made.level))} tie on validation, and the smallest was taken"
            found.setdefault((what, "the search does not tell them apart"), []).append(label)
        elif made.edge is not None and run.tuned is not None:
            what = f"{shown(run.tuned)}, the {made.edge} tried, was chosen"
            found.setdefault((what, "the best may lie beyond: widen the grid"), []).append(label)
    return [f"{tune.key} = {what} for {'; '.join(labels)}: {so}." for (what, so), labels in found.items()]
