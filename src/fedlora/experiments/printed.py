"""The paper's tables as it prints them, with our numbers above the printed ones and the difference below.

experiments/paper_numbers.toml holds columns and numbers; its head says what each key means.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean

from fedlora.errors import ConfigError
from fedlora.experiments.digits import places
from fedlora.experiments.footnotes import notes
from fedlora.experiments.grid import Grid
from fedlora.experiments.scores import parse_number
from fedlora.experiments.spec import Experiment, Part
from fedlora.experiments.table_forms import Table
from fedlora.experiments.tables import CellScore, score_cells
from fedlora.given_files import read_toml

PAPER_NUMBERS = "paper_numbers.toml"  # beside the experiments
OURS, PAPER, GAP = "ours", "paper", "ours - paper"
_SHOWN = ("test, last", "test, best", "clients, last")  # a table of each that was measured
_WHEN = {
    "test, last": "after the last round", "test, best": "after the round that is best on validation",
    "clients, last": "each client's own readout after the last round, the mean over clients",
}  # fmt: skip
Rows = dict[str, list[str]]


class Column(Part):
    """head: as printed. over: a head above several columns. at: axis -> label, of our cells. of: the data that our
    number is of; "" for the number that the experiment compares."""

    head: str
    over: str = ""
    at: dict[str, str] = {}  # noqa: RUF012 - pydantic copies it
    of: str = "test"


class PaperTable(Part):
    """A table of the paper. rows: row -> its numbers; with `blocks`, an axis, label of it -> such rows. average: the
    head of a last column, the mean of the others. times, digits: how our numbers are written."""

    caption: str
    columns: list[Column]
    rows: Rows | dict[str, Rows]
    blocks: str | None = None
    average: str | None = None
    times: float = 1.0
    digits: int = 2

    @property
    def heads(self) -> list[str]:
        return [*(column.head for column in self.columns), *([self.average] if self.average else [])]

    def of_block(self, block: str) -> Mapping[str, list[str]]:
        """Row -> its printed numbers; block: "" in a table without blocks."""
        found = self.rows if self.blocks is None else self.rows.get(block, {})
        return {row: told for row, told in found.items() if isinstance(told, list)} if isinstance(found, dict) else {}


def paper_of(experiment: Experiment) -> PaperTable | None:
    """The table of the paper that the experiment repeats, from the file beside it; None if it repeats none. Raises
    `ConfigError` if the file lacks it."""
    if experiment.paper is None or experiment.folder is None:
        return None
    found = read_paper(place := experiment.folder / PAPER_NUMBERS)
    if experiment.paper not in found:
        raise ConfigError(
            f"{experiment.name} repeats the table paper = {experiment.paper!r}, and {place} has only: "
            f"{', '.join(found) or 'nothing'}. Put a {PAPER_NUMBERS} with this table beside the experiment."
        )
    return found[experiment.paper]


def read_paper(path: Path) -> dict[str, PaperTable]:
    """Name -> table of the paper; empty if there is no such file.

    Raises:
        ConfigError: not such tables, or a row with more or fewer numbers than the table has columns.
    """
    found = {}
    for name, raw in (read_toml(path, "the paper's numbers") if path.is_file() else {}).items():
        found[name] = table = PaperTable.read(raw, f"{path}: [{name}] is no table of a paper")
        for block in [""] if table.blocks is None else table.rows:
            for row, told in table.of_block(block).items():
                if len(told) != len(table.heads):
                    raise ConfigError(
                        f"{path}: [{name}] has {len(table.heads)} columns ({', '.join(table.heads)}), and its row "
                        f"{row} of {block or 'no block'} has {len(told)} numbers. Give each column one."
                    )
    return found


def printed_tables(grid: Grid, paper: PaperTable, number: str = "") -> list[Table]:
    """The paper's table filled with the grid's runs: after the last round, at the best one, and of each client's own
    readout, as far as measured. number: only this one, such as "test, best". Raises `ConfigError` if the paper's
    columns name cells that the experiment does not have."""
    asked = [number] if number or grid.which() not in _SHOWN else dict.fromkeys([grid.which(), *_SHOWN])
    made = [_Filled(grid, paper, grid.which(name)) for name in asked]
    return [one.table() for one in made if one is made[0] or one.measured]


@dataclass(frozen=True)
class _Line:
    """One row of one block, a value per column. ours: None where no cell of the profile is."""

    block: str
    row: str
    ours: Sequence[CellScore | None]
    paper: Sequence[str]


@dataclass(frozen=True)
class _Filled:
    """One table. number: what "test" columns show of ours."""

    grid: Grid
    paper: PaperTable
    number: str

    def which(self, column: Column) -> str | None:
        """The number of a column; None if there is none, as of clients' own readouts on another test set."""
        if not column.of:
            return self.grid.which()
        asked = parse_number(self.number)
        if asked.where == "test":
            return f"{column.of}, {asked.what}"
        return self.number if column.of == "test" else None

    @cached_property
    def cells(self) -> list[list[CellScore]]:
        """Of each column, the cells at its labels."""
        axes, by_number = self.grid.experiment.axes, dict[str, list[CellScore]]()
        found = []
        for column in self.paper.columns:
            for axis, label in column.at.items():
                if label not in axes.get(axis, {}):
                    raise ConfigError(f"the paper's column {column.head} is of {axis} = {label!r}, which no axis has.")
            which = self.which(column)
            if which is not None and which not in by_number:
                by_number[which] = score_cells(self.grid, which)
            there = by_number[which] if which is not None else []
            found.append([c for c in there if all(c.cell[axis] == label for axis, label in column.at.items())])
        return found

    @property
    def measured(self) -> bool:
        return any(cell.scores for column in self.cells for cell in column)

    def lines(self) -> Iterator[_Line]:
        """Every row, in the experiment's order; then the rows that only the paper has."""
        axes, blocks = self.grid.experiment.axes, self.paper.blocks
        labels = [""] if blocks is None else list(dict.fromkeys([*axes.get(blocks, {}), *self.paper.rows]))
        for block in labels:
            printed = self.paper.of_block(block)
            for row in dict.fromkeys([*axes[self.grid.rows], *printed]):
                ours = [self._one(column, block, row) for column in self.cells]
                if self.paper.average:
                    ours.append(_average([one for one in ours if one and one.scores], len(ours)))
                if row in printed or any(one and (one.scores or one.none) for one in ours):
                    yield _Line(block, row, ours, printed.get(row, [""] * len(ours)))

    def _one(self, column: Sequence[CellScore], block: str, row: str) -> CellScore | None:
        at = {self.grid.rows: row} | ({self.paper.blocks: block} if self.paper.blocks else {})
        found = [cell for cell in column if all(cell.cell[axis] == label for axis, label in at.items())]
        if len(found) > 1:
            odd = " and ".join(", ".join(cell.cell.values()) for cell in found[:2])
            raise ConfigError(f"a cell of the paper's table is {len(found)} of ours: {odd}. Name them by `at`.")
        return found[0] if found else None

    def table(self) -> Table:
        paper, blocks = self.paper, self.paper.blocks
        rows: list[list[str]] = []
        marks: dict[tuple[int, int], str] = {}
        at: dict[tuple[str, str], list[tuple[int, list[float | None]]]] = {}
        own = self.grid.which() == self.grid.experiment.metric  # a profile may compare rounds to another target
        other = {k for k, column in enumerate(paper.columns) if not column.of and not own}
        for line in self.lines():
            means = [None if one is None else one.mean for one in line.ours]
            mine = [None if mean is None else paper.times * mean for mean in means]
            theirs = [_first_number(text) for text in line.paper]
            gaps = [
                "" if a is None or b is None or k in other else f"{a - b:+.{paper.digits}f}"
                for k, (a, b) in enumerate(zip(mine, theirs, strict=True))
            ]
            parts: list[tuple[str, Sequence[str], list[float | None]]] = [
                (OURS, [self._words(one) for one in line.ours], mine), (PAPER, line.paper, theirs), (GAP, gaps, [])
            ]  # fmt: skip
            for what, texts, numbers in parts:
                if any(texts):
                    at.setdefault((line.block, what), []).append((len(rows), numbers))
                    rows.append([*([line.block] if blocks else []), line.row, what, *texts])
        names = 3 if blocks else 2
        less = any(cell.less for column in self.cells for cell in column)
        for of in at.values():
            marks |= {(row, names + k): mark for (row, k), mark in _marked(of, less).items()}
        over = [*[""] * names, *(c.over for c in paper.columns), *([""] if paper.average else [])]
        columns = [*([blocks] if blocks else []), self.grid.rows, "", *paper.heads]
        return Table(
            columns, rows, self._caption(), self._below(), names, over if any(over) else (), grouped=True, marks=marks
        )

    def _words(self, one: CellScore | None) -> str:
        if one is None or not one.scores:
            return "none" if one is not None and one.none else ""
        return one.words(self._form)

    def _form(self, mean: float, spread: float | None) -> str:
        told = f"{self.paper.times * mean:.{self.paper.digits}f}"
        return told if spread is None else f"{told} ± {self.paper.times * spread:.{self.paper.digits}f}"

    def _caption(self) -> str:
        times = f", times {self.paper.times:g}" if self.paper.times != 1 else ""
        when = _WHEN.get(self.number, self.number)
        seeds = len(self.grid.seeds)
        of = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "of one seed"
        return (
            f"{self.paper.caption} *{OURS}*: profile {self.grid.profile}, {when}, {of}{times}; *{PAPER}*: as printed; "
            f"the best of each kind is bold, the second underlined."
        )

    def _below(self) -> list[str]:
        lacking: dict[str, list[str]] = {}
        measured: dict[str, list[CellScore]] = {}
        for column, cells in zip(self.paper.columns, self.cells, strict=True):
            which = self.which(column)
            if which is not None and any(cell.scores for cell in cells):
                measured.setdefault(which, []).extend(cells)
                continue
            ran = which is None or any(cell.metric is not None for cell in cells)
            why = f"no run measured '{which or self.number}' of it" if ran else "no run of it is there"
            lacking.setdefault(why, []).append(f"{column.head} ({column.over})" if column.over else column.head)
        gone = [f"No number of ours for {', '.join(heads)}: {why}." for why, heads in lacking.items()]
        if self.paper.average and gone:
            gone.append(f"{self.paper.average} needs all columns.")
        return [*gone, *(line for which, cells in measured.items() for line in notes(self.grid, which, cells=cells))]


def _average(columns: Sequence[CellScore], wanted: int) -> CellScore | None:
    """The mean over the columns, seed by seed; None if a column is missing."""
    if len(columns) < wanted:
        return None
    shared = set.intersection(*({*one.scores} for one in columns))
    means = {seed: fmean(one.scores[seed] for one in columns) for seed in sorted(shared)}
    none = {seed for one in columns for seed in one.none}
    return replace(columns[0], scores=means, none=tuple(sorted(none)))


def _marked(lines: Sequence[tuple[int, list[float | None]]], less: bool) -> dict[tuple[int, int], str]:
    """(row, column) -> "best" or "second", column by column; none in a column of equal numbers."""
    found = {}
    for k in range(max((len(numbers) for _, numbers in lines), default=0)):
        there = [(row, x) for row, numbers in lines if k < len(numbers) and (x := numbers[k]) is not None]
        if len({x for _, x in there}) > 1:
            order = places([x for _, x in there], smaller_is_better=less)
            for (row, _), place in zip(there, order, strict=True):
                if place < 2:
                    found[row, k] = ("best", "second")[place]
    return found


def _first_number(text: str) -> float | None:
    found = re.match(r"[-+]?\d+(\.\d+)?", text)
    return float(found[0]) if found else None
