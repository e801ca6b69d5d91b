"""Tables for people, documents and programs: on the screen, as Markdown, LaTeX, CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from fedlora.cli.screen import Table as Drawn
from fedlora.cli.screen import console
from fedlora.core import files
from fedlora.errors import ConfigError
from fedlora.runs.folder import plain

if TYPE_CHECKING:
    from fedlora.experiments.table_forms import Table  # imports torch


class Format(StrEnum):
    """How a command prints its result."""

    table = "table"
    markdown = "markdown"
    latex = "latex"
    csv = "csv"
    json = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="for people, documents or programs")]
JsonAlias = Annotated[bool, typer.Option("--json", help="the same as --format json")]


@dataclass(frozen=True)
class Printed:
    """One result in all formats. tables and remarks: text for people; records: one CSV line each, with all digits;
    value: for JSON."""

    tables: Sequence[Table]
    records: Sequence[Mapping[str, Any]]
    value: Mapping[str, Any]
    remarks: Sequence[str] = field(default=())


def chosen(format: Format, json: bool) -> Format:
    """The format; --json is an alias. Raises `ConfigError` if both are given and differ."""
    if json and format not in (Format.table, Format.json):
        raise ConfigError(f"--json and --format {format} are two formats; give one.")
    return Format.json if json else format


def show(printed: Printed, format: Format, out: Path | None = None) -> None:
    """Print the result to stdout. out: write it to this file instead. Raises `ConfigError` for a format that no file
    has."""
    if out is not None and format is Format.table:
        raise ConfigError(f"{out} is written in a format: give --format markdown, latex, csv or json.")
    if format is Format.table:
        for part in (part for table in printed.tables for part in fitting(table, console.width)):
            console.print(_on_screen(part))
        for remark in printed.remarks:
            console.print(remark)
    elif out is not None:
        files.write(out, _text(printed, format))
    else:
        print(_text(printed, format), end="")
    if format is Format.csv or out is not None:
        for remark in printed.remarks:  # a program reads the lines, a person reads what they are about
            print(remark, file=sys.stderr)


def _text(printed: Printed, format: Format) -> str:
    """The result in a format for documents and programs."""
    from fedlora.experiments.table_forms import latex, markdown, plain_caption

    if format is Format.json:
        return json.dumps(plain(printed.value), indent=2, sort_keys=True) + "\n"
    if format is Format.csv:
        return _csv(printed.records)
    if format is Format.latex:
        apart = "\n\n".join(map(latex, printed.tables))  # tabulars of one paragraph would stand side by side
        return "\n".join([apart, *(f"% {remark}" for remark in printed.remarks)]) + "\n"
    parts = [f"{plain_caption(table)}\n\n{markdown(table)}".rstrip() for table in printed.tables]
    return "\n\n".join([*parts, *printed.remarks]) + "\n"


def fitting(table: Table, width: int) -> list[Table]:
    """The table; if it is wider than `width` characters, several with part of the columns, each with the names."""
    from fedlora.experiments.table_forms import heads

    lines = [heads(table), *table.rows]
    widths = [max(len(line[k]) for line in lines) + len(" │ ") for k in range(len(table.columns))]
    names = list(range(table.names))
    parts, used = [names], 1 + sum(widths[: table.names])
    for k in range(table.names, len(widths)):
        if len(parts[-1]) > table.names and used + widths[k] > width:
            parts.append(names)
            used = 1 + sum(widths[: table.names])
        parts[-1] = [*parts[-1], k]
        used += widths[k]
    captions = [table.caption, *[f"{table.caption} (continued)"] * (len(parts) - 1)]
    return [
        replace(table, caption=caption, columns=[lines[0][k] for k in part], over=(),
                rows=[[row[k] for k in part] for row in table.rows],
                marks={(row, part.index(k)): mark for (row, k), mark in table.marks.items() if k in part})
        for caption, part in zip(captions, parts, strict=True)
    ]  # fmt: skip


def _on_screen(table: Table) -> Drawn:
    """Numbers are never folded; if even one number column does not fit beside the names, the names are folded."""
    from fedlora.experiments.table_forms import plain_caption

    drawn = Drawn(title=plain_caption(table), title_justify="left")
    for k, column in enumerate(table.columns):
        name = k < table.names
        drawn.add_column(column, no_wrap=not name, overflow="fold", justify="left" if name else "right")
    styles = {"best": "bold", "second": "underline", "": ""}
    for k, row in enumerate(table.rows):
        told = [cell if table.spans(k, c) else "" for c, cell in enumerate(row)]
        drawn.add_row(*(Text(cell, styles[table.marks.get((k, c), "")]) for c, cell in enumerate(told)))
        if table.grouped and k + 1 < len(table.rows) and table.spans(k + 1, 0):
            drawn.add_section()
    return drawn


def _csv(records: Sequence[Mapping[str, Any]]) -> str:
    """A header and one line per record; a missing number is empty."""
    text = io.StringIO()
    columns = list(dict.fromkeys(key for record in records for key in record))
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(plain(records))
    return text.getvalue()
