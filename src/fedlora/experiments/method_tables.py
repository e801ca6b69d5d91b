"""Kinds of table that set methods side by side: places seed by seed, costs, rounds to a target, clients' own readouts,
categories of tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from fedlora.experiments.footnotes import notes
from fedlora.experiments.grid import Grid
from fedlora.experiments.result import Result
from fedlora.experiments.scores import capital
from fedlora.experiments.table_forms import Table
from fedlora.experiments.tables import in_its_unit, orders, placings, score_by, score_cells

_PLACES = 5  # so many places have a column of their own on 80 characters
_SHARED = (
    "Places: methods whose scores differ by less than one in a hundred thousand share the better place; the next place "
    "stays empty. Methods without a number share the last place. An order with a shared place counts as an order of "
    "its own."
)


def places(grid: Grid) -> Table:
    """How often each label of the row axis was first, second, ...: of an experiment of one axis."""
    scored = [cell for cell in score_cells(grid) if cell.ranked()]
    found = placings(scored, grid.rows) if len(scored) > 1 < len(grid.seeds) else []
    if not found:
        return Table([], [], "")
    own = min(len(found), _PLACES)
    heads = [f"{k}{('st', 'nd', 'rd')[k - 1] if k < 4 else 'th'}" for k in range(1, own + 1)]
    lower = ["lower"] if len(found) > own else []
    rows = [
        [p.label, *map(str, p.counts[:own]), *(str(sum(p.counts[own:])) for _ in lower), f"{p.mean:.2f}"] for p in found
    ]
    different, on = orders(scored)
    changes = "the same order on every seed" if different == 1 else f"{different} different orders on {on} seeds"
    shared = any(sum(taken) != sum(found[0].counts) for taken in zip(*(p.counts for p in found), strict=True))
    caption = f"Places by seed, by {in_its_unit(grid.which(), scored)}: {changes}."
    return Table([grid.rows, *heads, *lower, "mean place"], rows, caption, [_SHARED] if shared else [])


# A run's costs, in the mean over seeds. Private runs report no traffic.
_COSTS: Mapping[str, Callable[[Sequence[Result]], str]] = {
    "target": lambda runs: " and ".join(dict.fromkeys(r.target for r in runs)),
    "MB up": lambda runs: _megabytes([r.megabytes_up for r in runs]),
    "MB down": lambda runs: _megabytes([r.megabytes_down for r in runs]),
    "aggregate s": lambda runs: f"{fmean(r.seconds.get('aggregate', 0.0) for r in runs):.2f}",
    "gauge": lambda runs: (
        f"{max(told):.1e}" if (told := _told([r.gauge_drift.get(r.method) for r in runs])) else "not told"
    ),
}


def costs(grid: Grid) -> Table:
    """What a run sends and takes, and how far its update moves with coordinates, on the worst seed."""
    by: dict[tuple[str, ...], list[Result]] = {}
    for run, result in grid.used:
        by.setdefault(grid.place(run.cell), []).append(result)
    rows = [[*key, *(column(of) for column in _COSTS.values())] for key, of in by.items()]
    caption = "The cost of a run, and its gauge check."
    return Table([*grid.axes, *_COSTS], rows, caption, names=len(grid.axes) + 1)


def _megabytes(each: Sequence[float | None]) -> str:
    """14.1; below 1 MB 0.023, because one digit would show 0.0."""
    told = _told(each)
    return f"{fmean(told):.{1 if fmean(told) >= 1 else 3}f}" if told else "not told"


def _told(each: Sequence[float | None]) -> list[float]:
    return [x for x in each if x is not None]


def rounds(grid: Grid, which: str) -> Table:
    """How soon each cell's runs reach the target. which: a number "rounds to X"."""
    cells = [cell for cell in score_cells(grid, which) if cell.scores or cell.none]
    rows = [
        [*grid.place(cell.cell), "never" if cell.median is None else f"{cell.median:g}",
         f"{len(cell.none)} of {len(cell.scores) + len(cell.none)}"]
        for cell in cells
    ]  # fmt: skip
    caption = (
        f"{capital(in_its_unit(which, cells))}: the median, with a run that never gets there as the worst. *never*: "
        f"such runs."
    )
    return Table([*grid.axes, "median", "never"], rows, caption, notes(grid, which), len(grid.axes))


def clients(grid: Grid) -> Table:
    """Each client's own readout after the last round, a column for each of the grid's cells."""
    return _by_cell(
        grid, "client (rank)", "Each client's own readout after the last round, the mean over seeds.",
        "clients, last", lambda result: {
            f"{name} ({result.ranks[name]})" if name in result.ranks else name: value
            for name, scores in result.clients_at_end.items()
            if (value := scores.get(result.metric)) is not None
        },
    )  # fmt: skip


def categories(grid: Grid, which: str) -> Table:
    """Means by category, for data in tasks. which: a number's name."""
    caption = f"By category of its tasks, the mean over tasks and seeds: {which}."
    return _by_cell(grid, "category", caption, which, lambda result: result.by_category(which))


def _by_cell(grid: Grid, of: str, caption: str, which: str, told: Callable[[Result], Mapping[str, float]]) -> Table:
    """A row for each name that `told` gives, a column for each of the grid's cells with a result."""
    found = score_by(grid, told)
    labels = sorted({label for by in found.values() for label in by})
    rows = [[label, *(f"{by[label]:.3f}" if label in by else "" for by in found.values())] for label in labels]
    over = ["", *(where for where, _ in found)] if any(where for where, _ in found) else ()
    columns = [of, *(label for _, label in found)]
    return Table(columns, rows, caption, notes(grid, which) if rows else [], over=over)
