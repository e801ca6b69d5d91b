"""Tables for people, documents and programs: on the screen, as Markdown, LaTeX, CSV or JSON."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from fedlora.cli.screen import Table as Drawn
from fedlora.cli.screen import console
from fedlora.runs.folder import plain

if TYPE_CHECKING:
    from fedlora.experiments.tables import Table  # imports torch


class Format(StrEnum):
    """How a command prints its result."""

    table = "table"
    markdown = "markdown"
    latex = "latex"
    csv = "csv"
    json = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="for people, documents or programs")]


def show(tables: Sequence[Table], remarks: Sequence[str], format: Format) -> None:
    """Print tables, and below them what a reader must know. For programs: as JSON all of it, and as CSV the first table
    (with the second's columns beside it, if both are of the same cells), with the remarks on stderr."""
    below = list(dict.fromkeys([*(note for table in tables for note in table.notes[1:]), *remarks]))
    if format is Format.table:
        for table in tables:
            console.print(table.notes[0])
            console.print(_on_screen(table))
            for note in table.notes[1:]:
                console.print(note)
        for remark in remarks:
            console.print(remark)
    elif format is Format.markdown:
        parts = [f"{table.notes[0]}\n\n{_markdown(table)}" for table in tables]
        print("\n\n".join([*parts, *below]))
    elif format is Format.latex:
        parts = [_latex(table, k) for k, table in enumerate(tables, start=1)]
        print("\n".join(["\n\n".join(parts), *(f"% {note}" for note in below)]))
    elif format is Format.json:
        each = [{"about": table.notes[0], "notes": table.notes[1:], "rows": _records(table)} for table in tables]
        print(json.dumps({"tables": each, "notes": list(remarks)}, indent=2))
    else:
        if tables:
            frame, names = tables[0].frame, list(tables[0].frame.columns[: tables[0].names])
            for other in tables[1:2]:
                if list(other.frame.columns[: other.names]) == names:
                    frame = frame.merge(other.frame, "left", names, suffixes=("", " of pairs"))
            print(frame.to_csv(index=False), end="")
        for note in [*(table.notes[0] for table in tables[:2]), *below]:
            print(note, file=sys.stderr)


def in_words(value: Any, column: str = "") -> str:
    """A cell: four significant digits, of p two; "" for no number, and "never" for rounds that never come."""
    if value is None or str(value) == "<NA>" or value != value:  # pandas' NA has no truth of its own
        return ""
    if not isinstance(value, float):
        return str(value)
    if math.isinf(value):
        return "never"
    if column.startswith("p"):
        return f"{value:.2g}"
    return f"{value:.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def _cells(table: Table) -> list[list[str]]:
    columns = list(table.frame.columns)
    rows = table.frame.itertuples(index=False, name=None)
    return [[in_words(value, name) for name, value in zip(columns, row, strict=True)] for row in rows]


def _records(table: Table) -> list[Any]:
    rows = table.frame.astype(object).where(table.frame.notna(), None).to_dict("records")
    return list(plain(rows))


def _on_screen(table: Table) -> Drawn:
    drawn = Drawn()
    for k, column in enumerate(table.frame.columns):
        name = k < table.names
        drawn.add_column(column, justify="left" if name else "right")
    for row in _cells(table):
        drawn.add_row(*map(Text, row))
    return drawn


def _markdown(table: Table) -> str:
    head = list(table.frame.columns)
    lines = [head, ["---" if k < table.names else "--:" for k in range(len(head))], *_cells(table)]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def _latex(table: Table, number: int) -> str:
    """A table with its caption and the label tab:NUMBER, for the package booktabs."""
    columns = "l" * table.names + "r" * (len(table.frame.columns) - table.names)
    head, *rows = [" & ".join(map(_escaped, line)) + r" \\" for line in [table.frame.columns, *_cells(table)]]
    return "\n".join([
        r"\begin{table}", r"\centering", rf"\caption{{{_escaped(table.notes[0])}}}", rf"\label{{tab:{number}}}",
        rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule", *rows, r"\bottomrule", r"\end{tabular}",
        r"\end{table}",
    ])  # fmt: skip


def _escaped(text: str) -> str:
    codes = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
    return "".join(codes.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in text)
