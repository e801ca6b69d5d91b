"""The tables of an experiment: each has columns, rows, and a caption above them.

A caption suffices for somebody who reads nothing else: what is shown, from how many seeds, in which unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedlora.experiments import method_tables
from fedlora.experiments.digits import difference_in_words, shown
from fedlora.experiments.footnotes import notes
from fedlora.experiments.grid import Grid
from fedlora.experiments.printed import paper_of, printed_tables
from fedlora.experiments.scores import capital, parse_number, scale
from fedlora.experiments.table_forms import Table
from fedlora.experiments.tables import CellScore, in_its_unit, paired, score_cells


def tables_of(grid: Grid, number: str = "") -> list[Table]:
    """The paper's table, scores, differences to the reference, categories, clients, as far as there are any.
    number: instead of the compared one."""
    experiment, paper = grid.experiment, paper_of(grid.experiment)
    printed = [] if paper is None else printed_tables(grid, paper, number)
    which = grid.which(number)
    first = method_tables.rounds(grid, which) if parse_number(which).where == "rounds" else scores(grid, [which])
    more = [differences(grid, which)] if experiment.reference else []
    more += [method_tables.categories(grid, f"{when}, last") for when in ("test", "unseen")]
    more += [method_tables.clients(grid)]
    return [*printed, first, *(table for table in more if table.rows)]


def scores(grid: Grid, names: Sequence[str]) -> Table:
    """A row for each cell with a result. names: of numbers, a column each."""
    tune = grid.experiment.tune
    each = {name: score_cells(grid, name) for name in names}
    which, cells = next(iter(each.items()))
    there = [k for k in range(len(cells)) if any(of[k].scores or of[k].none for of in each.values())]
    columns: dict[str, Callable[[int], str]] = {
        "mean ± sd" if len(each) == 1 else name: lambda k, of=of: of[k].words()  # type: ignore[misc]
        for name, of in each.items()
        if name == which or any(cell.scores for cell in of)
    }
    if len(grid.metrics) > 1:
        columns["metric"] = lambda k: cells[k].metric or ""
    columns["seeds"] = lambda k: _of_planned(cells[k])
    searched = ""
    if tune is not None and any(cell.tuned is not None for cell in cells):
        columns[tune.key] = lambda k: _value(grid, cells[k])
        seeds = ", ".join(map(str, tune.seeds))
        how = f"the value that the search chose on validation, on seed {seeds}, not compared here"
        one = len(grid.values) == 1
        searched = f" *{tune.key}*: {'as given, of one value there is no search' if one else how}."
    rows = [[*grid.place(cells[k].cell), *(column(k) for column in columns.values())] for k in there]
    alone = "; of one seed its number" if any(len(cells[k].scores) == 1 for k in there) else ""
    what = capital(
        in_its_unit(which, cells) if len(each) == 1 else " or ".join(map(scale, grid.metrics or ["accuracy"]))
    )
    caption = f"{what}: mean ± standard deviation over seeds{alone}.{searched}"
    return Table([*grid.axes, *columns], rows, caption, notes(grid, which, cells=cells), len(grid.axes))


def _of_planned(cell: CellScore) -> str:
    """The number of seeds with a number: "3"; "2 of 3" if more were planned."""
    there = len(cell.scores)
    return str(there) if there == cell.planned else f"{there} of {cell.planned}"


def differences(grid: Grid, number: str = "") -> Table:
    """All other labels against the reference, paired by seed. number: its name; "" for the compared one."""
    reference = grid.experiment.reference or ""
    cells, others = score_cells(grid, number), [a for a in grid.axes if a != grid.rows]
    found = paired(cells, grid.rows, reference)
    rows = [
        [d.other, *(d.where[a] for a in others), *difference_in_words(d.mean, d.low, d.high, " to "), str(d.pairs),
         d.verdict]
        for d in found
    ]  # fmt: skip
    family = ", without correction for their number." if len(found) < 2 else (
        f"; with {len(found)} of them, the chance that at least one excludes zero without a real difference is up to "
        f"{min(100, 5 * len(found))} %."
    )  # fmt: skip
    caption = (
        f"{capital(in_its_unit(grid.which(number), cells))}: each row minus that of {reference}, paired by seed "
        f"(*pairs*: their number), mean and 95 % interval (Student's t). {_better(cells)} Each interval covers one "
        f"comparison{family}"
    )
    columns = [grid.rows, *others, f"against {reference}", "95 % interval", "pairs", "verdict"]
    verdicts = [what for verdict, what in _VERDICTS.items() if verdict in {d.verdict for d in found}]
    return Table(columns, rows, caption, [*verdicts, *notes(grid, number, cells=cells)], len(grid.axes))


_VERDICTS = {
    "higher": "Higher: the score is above the reference's; the 95 % interval excludes zero.",
    "lower": "Lower: the score is below the reference's; the 95 % interval excludes zero.",
    "undecided": "Undecided: the 95 % interval contains zero.",
    "equal": "Equal: the same score on every seed, so there is no interval.",
    "no spread": "No spread: the same difference on every seed, so there is no interval.",
}


def _better(cells: Sequence[CellScore]) -> str:
    """Which sign is better; with several metrics, for each."""
    signs = {unit: "Negative" if cell.less else "Positive" for cell in cells if (unit := cell.unit) is not None}
    if len({*signs.values()}) < 2:
        return f"{next(iter(signs.values()), 'Positive')} is better."
    return "; ".join(f"{sign.lower()} is better of {unit}" for unit, sign in signs.items()).capitalize() + "."


def _value(grid: Grid, cell: CellScore) -> str:
    """The search's choice; and whether other values were as good, or it was at the edge."""
    if cell.tuned is None:
        return ""
    found = grid.choice(cell.cell)
    told = f" (of {len(found.level)} that tie)" if found.level else f" ({found.edge} tried)" if found.edge else ""
    return f"{shown(cell.tuned)}{told}"
