"""A table as commands show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Table:
    """caption: one paragraph. below: notes, a paragraph each. names: the number of columns that are labels; the others
    are numbers. over: a second head above each column, the same above neighbours that it spans. grouped: whether a
    label stands once for all rows below it that share it. marks: (row, column) -> "best" or "second"."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str
    below: Sequence[str] = ()
    names: int = 1
    over: Sequence[str] = ()
    grouped: bool = False
    marks: Mapping[tuple[int, int], str] = field(default_factory=dict)

    def spans(self, row: int, column: int) -> int:
        """How many rows the cell stands for: 1; of a label in groups more, and 0 below the first of its rows."""
        if not self.grouped or column >= self.names - 1:
            return 1
        mine = self.rows[row][: column + 1]
        if row and self.rows[row - 1][: column + 1] == mine:
            return 0
        after = (k for k in range(row, len(self.rows)) if self.rows[k][: column + 1] != mine)
        return next(after, len(self.rows)) - row
