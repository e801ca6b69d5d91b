"""Tables for people, documents and programs: on the screen, as Markdown, as CSV, as JSON."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedlora.cli.screen import Table as Drawn
from fedlora.cli.screen import console, print_json
from fedlora.errors import ConfigError
from fedlora.runs.folder import plain

if TYPE_CHECKING:
    from fedlora.experiments.table_source import Table  # imports torch

_IN_LATEX = str.maketrans({
    **{sign: f"\\{sign}" for sign in "&%$#_{}"}, "\\": r"\textbackslash{}", "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}", "±": r"$\pm$", "<": r"$<$", ">": r"$>$", "\n": " ",
})  # fmt: skip


class Format(StrEnum):
    """How a command prints its result."""

    table = "table"
    markdown = "markdown"
    latex = "latex"
    csv = "csv"
    long = "long"
    json = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="for people, documents or programs; long: CSV by round")]
JsonAlias = Annotated[bool, typer.Option("--json", help="the same as --format json")]


@dataclass(frozen=True)
class Printed:
    """One result in all formats. tables and remarks: text for people; records: one CSV line each, with all digits;
    value: for JSON. by_round: for curves, a line per run, round and score, if the result has rounds."""

    tables: Sequence[Table]
    records: Sequence[Mapping[str, Any]]
    value: Mapping[str, Any]
    remarks: Sequence[str] = field(default=())
    by_round: Sequence[Mapping[str, Any]] = field(default=())


def chosen(format: Format, json: bool) -> Format:
    """The format; --json is an alias. Raises `ConfigError` if both are given and differ."""
    if json and format not in (Format.table, Format.json):
        raise ConfigError(f"--json and --format {format} are two formats; give one.")
    return Format.json if json else format


def show(printed: Printed, format: Format) -> None:
    """Print the result to stdout."""
    if format is Format.json:
        print_json(plain(printed.value))
    elif format in (Format.csv, Format.long):
        if format is Format.long and not printed.by_round:
            raise ConfigError("--format long lists runs round by round, and this command shows no runs; use csv.")
        print(_csv(printed.by_round if format is Format.long else printed.records), end="")
        for remark in printed.remarks:  # a program reads the lines, a person reads what they are about
            print(remark, file=sys.stderr)
    elif format is Format.markdown:
        parts = [_markdown(table) for table in printed.tables]
        print("\n\n".join([*parts, *printed.remarks]))
    elif format is Format.latex:
        print("\n".join([*map(_latex, printed.tables), *(f"% {remark}" for remark in printed.remarks)]))
    else:
        for table in printed.tables:
            for part in fitting(table, console.width):
                console.print(_on_screen(part))
        for remark in printed.remarks:
            console.print(remark)


def fitting(table: Table, width: int) -> list[Table]:
    """The table; if it is wider than `width` characters, several with part of the columns, each with the names."""
    lines = [table.columns, *table.rows]
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
        replace(table, caption=caption, columns=[table.columns[k] for k in part],
                rows=[[row[k] for k in part] for row in table.rows])
        for caption, part in zip(captions, parts, strict=True)
    ]  # fmt: skip


def _plain(table: Table) -> str:
    """The caption without emphasis marks."""
    return table.caption.replace("*", "")


def _on_screen(table: Table) -> Drawn:
    """Numbers are never folded; if even one number column does not fit beside the names, the names are folded."""
    drawn = Drawn(title=_plain(table), title_justify="left")
    for k, column in enumerate(table.columns):
        name = k < table.names
        drawn.add_column(column, no_wrap=not name, overflow="fold", justify="left" if name else "right")
    for row in table.rows:
        drawn.add_row(*row)
    return drawn


def _markdown(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", r"\|").replace("\n", " ") for cell in cells) + " |"

    rule = [":---" if k < table.names else "---:" for k in range(len(table.columns))]
    return "\n".join([f"{_plain(table)}\n", line(table.columns), line(rule), *map(line, table.rows)])


def _latex(table: Table) -> str:
    """A tabular for booktabs."""

    def line(cells: Sequence[str]) -> str:
        row = " & ".join(cell.translate(_IN_LATEX) for cell in cells)
        return ("{}" if row.lstrip().startswith(("[", "*")) else "") + row + r" \\"  # or \\ before takes an argument

    columns = "l" * table.names + "r" * (len(table.columns) - table.names)
    body = [r"\toprule", line(table.columns), r"\midrule", *map(line, table.rows), r"\bottomrule"]
    return "\n".join([f"% {_plain(table)}", rf"\begin{{tabular}}{{{columns}}}", *body, r"\end{tabular}"])


def _csv(records: Sequence[Mapping[str, Any]]) -> str:
    """A header and one line per record; a missing number is empty."""
    text = io.StringIO()
    columns = list(dict.fromkeys(key for record in records for key in record))
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(plain(records))
    return text.getvalue()
