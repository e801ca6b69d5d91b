"""Tables for people, documents and programs: on the screen, as Markdown, as CSV, as JSON."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

import typer

from fedlora.cli.screen import Table, console, print_json
from fedlora.errors import ConfigError
from fedlora.runs.folder import plain

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
class Sheet:
    """A table in words. The first `names` columns are text, the others numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int = 1


@dataclass(frozen=True)
class Printed:
    """One result in all formats. sheets and remarks are for people, in words; records for CSV, one a line, with all
    digits; value for JSON. by_round: for curves, a line a run, round and score; of what has rounds."""

    sheets: Sequence[Sheet]
    records: Sequence[Mapping[str, Any]]
    value: Mapping[str, Any]
    remarks: Sequence[str] = field(default=())
    by_round: Sequence[Mapping[str, Any]] = field(default=())


def chosen(format: Format, json: bool) -> Format:
    """The format, with --json for its old name. Raises `ConfigError` where both are given and differ."""
    if json and format not in (Format.table, Format.json):
        raise ConfigError(f"--json and --format {format} are two formats; give one.")
    return Format.json if json else format


def show(printed: Printed, format: Format) -> None:
    """On stdout."""
    if format is Format.json:
        print_json(plain(printed.value))
    elif format in (Format.csv, Format.long):
        if format is Format.long and not printed.by_round:
            raise ConfigError("--format long is of runs by their rounds, and this command shows none; take csv.")
        print(_csv(printed.by_round if format is Format.long else printed.records), end="")
        for remark in printed.remarks:  # a program reads the lines, a person what they are of
            print(remark, file=sys.stderr)
    elif format is Format.markdown:
        parts = [_markdown(sheet) for sheet in printed.sheets]
        print("\n\n".join([*parts, *printed.remarks]))
    elif format is Format.latex:
        print("\n".join([*map(_latex, printed.sheets), *(f"% {remark}" for remark in printed.remarks)]))
    else:
        for sheet in printed.sheets:
            for part in fitting(sheet, console.width):
                console.print(_table(part))
        for remark in printed.remarks:
            console.print(remark)


def fitting(sheet: Sheet, width: int) -> list[Sheet]:
    """The sheet, or where it is wider than so many characters its columns in several, each with the names."""
    lines = [sheet.columns, *sheet.rows]
    widths = [max(len(line[k]) for line in lines) + len(" │ ") for k in range(len(sheet.columns))]
    names = list(range(sheet.names))
    parts, used = [names], 1 + sum(widths[: sheet.names])
    for k in range(sheet.names, len(widths)):
        if len(parts[-1]) > sheet.names and used + widths[k] > width:
            parts.append(names)
            used = 1 + sum(widths[: sheet.names])
        parts[-1] = [*parts[-1], k]
        used += widths[k]
    titles = [sheet.title, *[f"{sheet.title} (continued)"] * (len(parts) - 1)]
    return [
        Sheet(title, [sheet.columns[k] for k in part], [[row[k] for k in part] for row in sheet.rows], sheet.names)
        for title, part in zip(titles, parts, strict=True)
    ]


def _table(sheet: Sheet) -> Table:
    """Numbers stand whole; where even one column of them does not fit beside the names, these are folded."""
    table = Table(title=sheet.title, title_justify="left")
    for k, column in enumerate(sheet.columns):
        name = k < sheet.names
        table.add_column(column, no_wrap=not name, overflow="fold", justify="left" if name else "right")
    for row in sheet.rows:
        table.add_row(*(cell for cell in row))
    return table


def _markdown(sheet: Sheet) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", r"\|").replace("\n", " ") for cell in cells) + " |"

    rule = [":---" if k < sheet.names else "---:" for k in range(len(sheet.columns))]
    return "\n".join([f"{sheet.title}\n", line(sheet.columns), line(rule), *map(line, sheet.rows)])


def _latex(sheet: Sheet) -> str:
    """A tabular for booktabs."""

    def line(cells: Sequence[str]) -> str:
        return " & ".join(cell.translate(_IN_LATEX) for cell in cells) + r" \\"

    columns = "l" * sheet.names + "r" * (len(sheet.columns) - sheet.names)
    body = [r"\toprule", line(sheet.columns), r"\midrule", *map(line, sheet.rows), r"\bottomrule"]
    return "\n".join([f"% {sheet.title}", rf"\begin{{tabular}}{{{columns}}}", *body, r"\end{tabular}"])


def _csv(records: Sequence[Mapping[str, Any]]) -> str:
    """A header and a line a record; what there is no number for is empty."""
    text = io.StringIO()
    columns = list(dict.fromkeys(key for record in records for key in record))
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(plain(records))
    return text.getvalue()
