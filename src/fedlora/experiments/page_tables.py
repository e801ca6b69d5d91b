"""The kinds of table for pages: each has columns, rows, and a caption above them.

A caption suffices for somebody who reads nothing else on the page: what is shown, from how many seeds, in which unit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from fedlora.errors import ConfigError
from fedlora.experiments import method_tables, verdict_tables
from fedlora.experiments.budgets import SIMULATIONS, budget_rows, spendings
from fedlora.experiments.costs import trained_on
from fedlora.experiments.digits import difference_in_words, shown
from fedlora.experiments.footnotes import notes
from fedlora.experiments.grid import Grid
from fedlora.experiments.prices import price_rows, prices
from fedlora.experiments.printed import PAPER_NUMBERS, paper_of, printed_tables
from fedlora.experiments.result import SCORES, Result
from fedlora.experiments.scores import capital, parse_number, scale
from fedlora.experiments.table_source import Source, Table
from fedlora.experiments.tables import (
    CellScore,
    Difference,
    in_its_unit,
    paired,
    score_cells,
)

_ONE = "Each interval covers one comparison, without correction for their number."


def table_of(kind: str, source: Source) -> Table:
    """The table of a kind. Raises `ConfigError` for words that the kind does not take."""
    return KINDS[kind](source)


def tables_of(grid: Grid, number: str = "") -> list[Table]:
    """All tables without a plan: the paper's, scores, differences to the reference, prices, budgets, categories,
    clients. number: instead of the compared one."""
    experiment, paper = grid.experiment, paper_of(grid.experiment)
    printed = [] if paper is None else printed_tables(grid, paper, number)
    asked = [("rounds" if parse_number(grid.which(number)).where == "rounds" else "scores", number)]
    asked += [("differences", f": {number}")] if experiment.reference else []
    asked += [("prices", score) for score in SCORES] if experiment.peace else []
    asked += [("budgets", "")] if experiment.budgets else []
    asked += [("categories", f"{when}, last") for when in ("test", "unseen")]
    asked += [("clients", "")]
    made = [table_of(kind, Source(grid, words)) for kind, words in asked]
    return [*printed, made[0], *(table for table in made[1:] if table.rows)]


def _paper(source: Source) -> Table:
    """The paper's table with our numbers. words: a number's name, or ""."""
    paper = paper_of(source.grid.experiment)
    if paper is None:
        raise ConfigError(f"{source.grid.experiment.name} repeats no table of {PAPER_NUMBERS}: it has no key `paper`.")
    return printed_tables(source.grid, paper, source.words)[0]


def _budgets(source: Source) -> Table:
    grid, axes = source.grid, source.grid.experiment.budgets
    columns, rows = budget_rows(spendings(grid), axes.lines if axes else "")
    caption = (
        f"Privacy spent, and {scale('accuracy')} and {scale('loss')} on held-out test data after the last round: "
        "mean ± standard deviation over *seeds*. *epsilon* (rounded up) at *delta*; *z*: noise multiplier; *q*: "
        f"share of the clients asked in a round. {SIMULATIONS}"
    )
    return Table(columns, rows, caption, notes(grid, ""))


def _prices(source: Source) -> Table:
    """What each row costs without an attacker, and saves with one. words: the score."""
    if source.words not in SCORES:
        raise ConfigError(f"'prices' takes one of {', '.join(SCORES)}; got {source.words!r}.")
    experiment, peace = source.grid.experiment, source.grid.experiment.peace
    found = [price for price in prices(source.grid) if price.score == source.words]
    columns, rows = price_rows(found, source.words)
    counts = sorted({price.pairs for price in found}) or [0]
    seeds = f"{counts[0]} to {counts[-1]} seeds" if len(counts) > 1 else f"{counts[0]} seed{'s' * (counts[0] > 1)}"
    name = {"loss": "log-loss"}.get(source.words, source.words)
    intervals = f", with 95 % intervals. {_ONE}" if counts[-1] > 1 else ". One seed has no interval."
    caption = "" if peace is None else (
        f"{capital(scale(source.words))} on held-out test data after the last round, the mean over {seeds}. In "
        f"brackets, against {experiment.rows} {experiment.reference}: *cost*, how much worse {name} is where "
        f"{peace.axis} is {peace.label}; *saved*, how much better elsewhere; paired by seed{intervals}"
    )  # fmt: skip
    told = [[cell or "not run" for cell in row] for row in rows]
    return Table([experiment.rows, *columns[1:]], told, caption, notes(source.grid, ""))


def _scores(source: Source) -> Table:
    """A row for each cell with a result. words: numbers' names, separated by semicolons; "" for the experiment's."""
    grid, tune = source.grid, source.grid.experiment.tune
    each = {grid.which(name): score_cells(grid, name) for name in map(str.strip, source.words.split(";"))}
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


def _differences(source: Source) -> Table:
    """Paired by seed. words: the `LABEL` of the row axis that all others are compared with, then a colon and a
    number's name; both are optional."""
    label, _, number = (part.strip() for part in source.words.partition(":"))
    grid, experiment = source.grid, source.grid.experiment
    reference, known = label or experiment.reference or "", experiment.axes[grid.rows]
    if reference not in known:
        raise ConfigError(f"{experiment.name} has no {grid.rows} {reference!r}: {', '.join(known)}.")
    cells, others = score_cells(grid, number), [a for a in grid.axes if a != grid.rows]
    found = paired(cells, grid.rows, reference)
    rows = [[d.other, *(d.where[a] for a in others), *_gap(d), d.verdict] for d in found]
    caption = _of_gaps(grid, number, cells, f"each row minus that of {reference}", len(found))
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


def _gap(d: Difference) -> list[str]:
    return [*difference_in_words(d.mean, d.low, d.high, " to "), str(d.pairs)]


def _of_gaps(grid: Grid, number: str, cells: Sequence[CellScore], minus: str, count: int) -> str:
    """count: the number of intervals."""
    family = _ONE if count < 2 else (
        f"Each interval covers one comparison; with {count} of them, the chance that at least one excludes zero "
        f"without a real difference is up to {min(100, 5 * count)} %."
    )  # fmt: skip
    return (
        f"{capital(in_its_unit(grid.which(number), cells))}: {minus}, paired by seed (*pairs*: their number), mean "
        f"and 95 % interval (Student's t). {_better(cells)} {family}"
    )


def _better(cells: Sequence[CellScore]) -> str:
    """Which sign is better; with several metrics, for each."""
    signs = {unit: "Negative" if cell.less else "Positive" for cell in cells if (unit := cell.unit) is not None}
    if len({*signs.values()}) < 2:
        return f"{next(iter(signs.values()), 'Positive')} is better."
    return "; ".join(f"{sign.lower()} is better of {unit}" for unit, sign in signs.items()).capitalize() + "."


# For mergers and for runs: column -> its number.
_OF_MERGERS: Mapping[str, Callable[[Result], float | None]] = {
    "relative error": lambda r: r.of.error if r.of else None,
    "norm": lambda r: r.of.norm if r.of else None,
    "rank": lambda r: r.of.rank if r.of else None,
}
_OF_RUNS: Mapping[str, Callable[[Result], float | None]] = {
    "factor averages would be off by": lambda r: r.score("server, error of factor averages"),
    "gauge drift": lambda r: r.score("server, gauge drift"),
}


def _mechanism(source: Source) -> Table:
    """What happens to the update in the last round, in the mean over seeds."""
    grid, merged = source.grid, source.grid.experiment.merged is not None
    columns = _OF_MERGERS if merged else _OF_RUNS
    found: dict[tuple[str, ...], list[list[float]]] = {}
    for run, result in grid.used:
        numbers = [x for column in columns.values() if (x := column(result)) is not None]
        if len(numbers) == len(columns):
            found.setdefault(grid.place(run.cell), []).append(numbers)
    rows = [[*key, *(_fact(fmean(column)) for column in zip(*lists, strict=True)), str(len(lists))]
            for key, lists in found.items()]  # fmt: skip
    caption = (
        "Each merger's result on the same uploads, the mean over seeds. *relative error*: distance of the merged "
        "update from the exact mean of the clients' products B A (0: equal; 1: as far as no update). *norm*: "
        "Frobenius, over all modules. *rank*: the largest of any module."
        if merged else
        "The last round, the mean over seeds. *factor averages would be off by*: relative error of averages of "
        "zero-padded factors against the exact mean of the products, on each method's own uploads. *gauge drift*: how "
        "far, relatively, the method's update moves when the same uploads are written in other coordinates of "
        "condition 10."
    )  # fmt: skip
    return Table([*grid.axes, *columns, "seeds"], rows, caption, notes(grid, searched=False))


def _times(source: Source) -> Table:
    """One row for all trainings of the profile, each counted once, whatever was merged from it."""
    each = {run.digest: result for run, result in source.grid.used}.values()
    trained = [count for result in each if (count := trained_on(result)) is not None]
    known, seconds = len(trained) == len(each), sum(result.seconds.get("train", 0.0) for result in each)
    row = {
        "runs": str(len(each)),
        "examples trained on": f"{sum(trained):,}" if known else "not known",
        "examples a second": f"{sum(trained) / seconds:.0f}" if known and seconds else "not known",
        "hours of one process": f"{sum(result.wall_seconds for result in each) / 3600:.1f}",
    }
    caption = (
        "All runs of the profile, each in a process with one thread. *examples a second*: while clients train, "
        "including the work that `remember_prefix` does once in a process. *hours of one process*: including data, "
        "evaluation and mergers. These are no benchmarks: other programs may have used the machine."
    )
    return Table([*row], [[*row.values()]], caption, notes(source.grid, ""))


def _value(grid: Grid, cell: CellScore) -> str:
    """The search's choice; and whether other values were as good, or it was at the edge."""
    if cell.tuned is None:
        return ""
    found = grid.choice(cell.cell)
    told = f" (of {len(found.level)} that tie)" if found.level else f" ({found.edge} tried)" if found.edge else ""
    return f"{shown(cell.tuned)}{told}"


def _fact(value: float) -> str:
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.3g}"


KINDS: Mapping[str, Callable[[Source], Table]] = {
    "paper": _paper,
    "budgets": _budgets,
    "prices": _prices,
    "scores": _scores,
    "differences": _differences,
    "places": method_tables.places,
    "costs": method_tables.costs,
    "decisions": verdict_tables.decisions,
    "gates": verdict_tables.gates,
    "seeds": verdict_tables.seeds,
    "rates": verdict_tables.rates,
    "mechanism": _mechanism,
    "times": _times,
    "categories": method_tables.categories,
    "rounds": method_tables.rounds,
    "clients": method_tables.clients,
}
PLANNED = ("decisions", "gates", "seeds", "rates")  # the kinds that need a plan
