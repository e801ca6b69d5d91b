"""The paper's tables: our number, the one that it prints, and the difference, under the paper's own heads.

experiments/paper_numbers.toml holds columns and numbers; its head says what each key means.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import pandas as pd
from pydantic import Field, model_validator

from fedlora.errors import ConfigError
from fedlora.experiments.scores import Number, parse_number
from fedlora.experiments.spec import Experiment, Part
from fedlora.experiments.tables import Runs, Table, by_cell, middle
from fedlora.experiments.tune import Progress
from fedlora.given_files import read_toml

PAPER_NUMBERS = "paper_numbers.toml"  # beside the experiments
OURS, PAPER, GAP = "ours", "paper", "ours - paper"
_SHOWN = ("test, last", "test, best", "clients, last")  # a table of each that was measured
_WHEN = {
    "test, last": "after the last round", "test, best": "after the round that is best on validation",
    "clients, last": "each client's own readout after the last round, the mean over clients",
}  # fmt: skip


class Column(Part):
    """head: as printed. over: a head above several columns. at: axis -> label, of our cells. of: the data that our
    number is of; "" for the number that the experiment compares."""

    head: str
    over: str = ""
    at: dict[str, str] = Field(default_factory=dict)
    of: str = "test"

    @property
    def words(self) -> str:
        return f"{self.over}: {self.head}" if self.over else self.head


class PaperTable(Part):
    """A table of the paper. blocks: the axis whose labels are blocks of rows, if there are several. rows: label of
    `blocks`, "" without -> row -> its numbers. average: the head of a last column, the mean of the others. times,
    digits: how our numbers are written."""

    caption: str
    columns: list[Column]
    rows: dict[str, dict[str, list[str]]]
    blocks: str | None = None
    average: str | None = None
    times: float = 1.0
    digits: int = 2

    @property
    def heads(self) -> list[str]:
        return [*(column.words for column in self.columns), *([self.average] if self.average else [])]

    @model_validator(mode="before")
    @classmethod
    def _one_block(cls, raw: dict[str, Any]) -> dict[str, Any]:
        return raw if "blocks" in raw else {**raw, "rows": {"": raw.get("rows")}}


def paper_of(experiment: Experiment) -> PaperTable | None:
    """The table of the paper that the experiment repeats, from the file beside it; None if it repeats none.

    Raises:
        ConfigError: the file lacks it, or a row has more or fewer numbers than the table has columns.
    """
    if experiment.paper is None or experiment.folder is None:
        return None
    place = experiment.folder / PAPER_NUMBERS
    raw = read_toml(place, "the paper's numbers") if place.is_file() else {}
    if experiment.paper not in raw:
        raise ConfigError(
            f"{experiment.name} repeats the table paper = {experiment.paper!r}, and {place} has only: "
            f"{', '.join(raw) or 'nothing'}. Put a {PAPER_NUMBERS} with this table beside the experiment."
        )
    table = PaperTable.read(raw[experiment.paper], f"{place}: [{experiment.paper}] is no table of a paper")
    for block, rows in table.rows.items():
        for row, printed in rows.items():
            if len(printed) != len(table.heads):
                raise ConfigError(
                    f"{place}: [{experiment.paper}] has {len(table.heads)} columns ({', '.join(table.heads)}), and its "
                    f"row {row} of {block or 'no block'} has {len(printed)} numbers. Give each column one."
                )
    return table


def paper_tables(progress: Progress, paper: PaperTable, which: str | None = None) -> list[Table]:
    """The paper's table filled with the runs: after the last round, at the best one, and of each client's own readout,
    as far as measured. which: only this number. Raises `ConfigError` if the columns name cells that are not there."""
    number = progress.grid.number(which)
    names = [number.name] if which or number.name not in _SHOWN else dict.fromkeys([number.name, *_SHOWN])
    made = [_Filled(progress, paper, parse_number(name)) for name in names]
    return [one.table() for one in made if one is made[0] or one.measured]


@dataclass(frozen=True)
class _Filled:
    """One table. number: what "test" columns show of ours."""

    progress: Progress
    paper: PaperTable
    number: Number

    def of(self, column: Column) -> Number | None:
        """The number of a column; None if there is none, as of clients' own readouts on another test set."""
        if not column.of:
            return self.progress.grid.number()
        if self.number.where == "test":
            return parse_number(f"{column.of}, {self.number.what}")
        return self.number if column.of == "test" else None

    @property
    def measured(self) -> bool:
        found = [(self.of(column), runs) for column in self.paper.columns for _, runs in by_cell(self.progress)]
        return any(n is not None and not math.isnan(n.of(line)) for n, runs in found for _, line in runs)

    def runs(self, column: Column, at: Mapping[str, str]) -> Runs:
        """Of the one cell with these labels; empty if the profile has none."""
        at = {**column.at, **at}
        axes = self.progress.grid.experiment.axes
        for axis, label in column.at.items():
            if label not in axes.get(axis, {}):
                raise ConfigError(f"the paper's column {column.head} is of {axis} = {label!r}, which no axis has.")
        found = [(cell, runs) for cell, runs in by_cell(self.progress) if at.items() <= cell.items()]
        if len(found) > 1:
            odd = " and ".join(", ".join(cell.values()) for cell, _ in found[:2])
            raise ConfigError(f"a cell of the paper's table is {len(found)} of ours: {odd}. Name them by `at`.")
        return found[0][1] if found else []

    def rows(self) -> Iterator[tuple[str, str, list[str], Sequence[str], list[str]]]:
        """(block, row, ours, paper's, gaps), in the experiment's order; then the rows that only the paper has."""
        grid, paper = self.progress.grid, self.paper
        axes = grid.experiment.axes
        # A profile may count rounds to another target than the paper.
        comparable = grid.number() == parse_number(grid.experiment.metric)
        for block in dict.fromkeys([*axes.get(paper.blocks or "", {}), *paper.rows]):
            printed = paper.rows.get(block, {})
            for row in dict.fromkeys([*axes[grid.rows], *printed]):
                at = {grid.rows: row} | ({paper.blocks: block} if paper.blocks else {})
                each = [self._numbers(column, at) for column in paper.columns]
                if paper.average:
                    each.append(
                        {seed: fmean(one[seed] for one in each) for seed in each[0] if all(seed in x for x in each)}
                    )
                if row not in printed and not any(each):
                    continue
                theirs = printed.get(row, [""] * len(each))
                gaps = [
                    self._gap(ours, text) if comparable or (k < len(paper.columns) and paper.columns[k].of) else ""
                    for k, (ours, text) in enumerate(zip(each, theirs, strict=True))
                ]
                yield block, row, [self._words(one) for one in each], theirs, gaps

    def _numbers(self, column: Column, at: Mapping[str, str]) -> dict[int, float]:
        """Seed -> our number, times 100 where the paper prints per cent."""
        number = self.of(column)
        each = self.runs(column, at) if number is not None else []
        return {run.seed: self.paper.times * number.of(line) for run, line in each if number is not None}

    def _words(self, ours: Mapping[int, float]) -> str:
        """Mean and spread; "2 of 3" where a run has no number, and of rounds the median and how many got there."""
        have = [x for x in ours.values() if not math.isnan(x)]
        if len(have) < len(ours) or self.number.of_rounds:
            counts = f"{len(have)} of {len(ours)}" if ours else ""
            mean = middle(self.number, ours.values())
            return f"{mean:.0f} ({counts})" if self.number.of_rounds and math.isfinite(mean) else counts
        spread = f" ± {stdev(have):.{self.paper.digits}f}" if len(have) > 1 else ""
        return f"{fmean(have):.{self.paper.digits}f}{spread}" if have else ""

    def _gap(self, ours: Mapping[int, float], theirs: str) -> str:
        printed, mean = re.match(r"[-+]?\d+(\.\d+)?", theirs), middle(self.number, ours.values())
        return f"{mean - float(printed[0]):+.{self.paper.digits}f}" if printed and math.isfinite(mean) else ""

    def table(self) -> Table:
        names = [*([self.paper.blocks] if self.paper.blocks else []), self.progress.grid.rows, ""]
        found = [
            [*([block] if self.paper.blocks else []), row, what, *texts]
            for block, row, *parts in self.rows()
            for what, texts in zip((OURS, PAPER, GAP), parts, strict=True)
            if any(texts)
        ]
        times = f", times {self.paper.times:g}" if self.paper.times != 1 else ""
        caption = (
            f"{self.paper.caption} ours: profile {self.progress.grid.profile}, "
            f"{_WHEN.get(self.number.name, self.number.name)}, mean ± standard deviation over the seeds{times}; "
            f"paper: as printed."
        )
        return Table(pd.DataFrame(found, columns=[*names, *self.paper.heads]), len(names), [caption])
