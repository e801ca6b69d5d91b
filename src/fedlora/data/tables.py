"""Reads CSV, TSV and JSONL files as text tables whose rows keep their place for error messages. It never guesses.

We use the standard library: pandas silently drops a surplus field, turns a missing one into "", skips blank lines,
renames duplicate columns and reads on after a closing quote; `datasets` turns texts that look like times into times,
and leaves a copy of all rows in its cache.
"""

from __future__ import annotations

import codecs
import csv
import difflib
import errno
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from fedlora.errors import DataError, repeated
from fedlora.given_files import half_the_memory, parse_json, read_given

_TOO_LARGE = "Is it the right file? If so, split it, and give each client its part."
_LINE = 2**24  # bytes of text in one row; a book has one million

_QUOTED = re.compile(r'"[^"]*"')
_LONE_RETURN = re.compile(r"\r(?!\n)")

Rows = list[tuple[str, dict[str, object]]]  # (where, {column: value})


@dataclass(frozen=True)
class Table:
    """One source's rows, unchanged.

    Args:
        name: the source's, for error messages.
        columns: all of the source's columns; for large sources, rows hold only the requested ones.
        rows: each row's (where, {column: value}); `where` is like "row 3, line 4".
        classes: column -> its classes by index, if the source names them. The column's values are then these names.

    Raises:
        DataError: there are no rows.
    """

    name: str
    columns: tuple[str, ...]
    rows: Rows
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.rows:
            raise DataError(f"{self.name} holds no rows. Was it written completely?")

    def having(self, columns: Iterable[str]) -> Table:
        """Itself. Raises `DataError` if a column is missing, or a row has no value in one of them."""
        for column in columns:
            if column not in self.columns:
                there = list(self.columns[:20])
                raise DataError(f"{self.name} has no column {column!r}; it has {there}.{self._hint(column)}")
        for where, row in self.rows:
            for column in columns:
                value = row.get(column)
                if value is None or (isinstance(value, str) and not value.strip()):
                    state = "missing" if value is None else "empty"
                    raise DataError(f"{self.name}, {where}: {column!r} is {state}. Fill it in, or drop the row.")
        return self

    def cells(self, column: str) -> list[tuple[str, object]]:
        """Each row's (where, value)."""
        return [(where, row[column]) for where, row in self.rows]

    def texts(self, column: str) -> tuple[str, ...]:
        """A column's values. Raises `DataError` if one is not a string that a tokeniser can read."""
        return tuple(readable(f"{self.name}, {where}: {column!r}", row[column]) for where, row in self.rows)

    def _hint(self, column: str) -> str:
        marks = [mark for mark in ";\t|" if len(self.columns) == 1 and mark in self.columns[0]]
        if marks:
            return f" Is {marks[0]!r} meant to separate columns? A .csv has commas, a .tsv has tabs."
        near = difflib.get_close_matches(column, self.columns, n=1, cutoff=0.5)
        return f" Did you mean {near[0]!r}?" if near else ""


def readable(place: str, value: object) -> str:
    """`value` as a string that a tokeniser can read. Raises `DataError`, whose message begins with `place`."""
    if not isinstance(value, str):
        raise DataError(f"{place} must be a string; got {type(value).__name__} {value!r}.")
    try:
        if not value.isascii():
            value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place} holds half of a surrogate pair at character {error.start}, which no tokeniser can read. The text "
            f"was cut inside an emoji or the like: repair the row."
        ) from error
    return value


def text_table(file: Path) -> Table:
    """The rows of a UTF-8 file (a byte order mark is dropped): .jsonl, .json, .csv or .tsv. Raises `DataError`."""
    try:
        content = _content(file).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        wide = error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        raise DataError(
            f"{file} is not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start}. Convert it, for "
            f"example with `iconv -f {'utf-16' if wide else 'cp1252'} -t utf-8`."
        ) from error
    separated = file.suffix.lower() in (".csv", ".tsv")
    found = _csv_rows(file, content) if separated else _json_rows(file, content)
    rows = [(f"row {k}, line {line}", row) for k, (line, row) in enumerate(found, start=1)]
    return Table(str(file), tuple(dict.fromkeys(name for _, row in rows for name in row)), rows)


def unreadable(file: Path, error: OSError) -> DataError:
    """The error for a file that cannot be opened."""
    if isinstance(error, FileNotFoundError):
        begin = "" if file.is_absolute() else f" Relative paths start at the working directory, {Path.cwd()}."
        return DataError(f"{file} does not exist.{begin}")
    hint = f" {_TOO_LARGE}" if error.errno == errno.EFBIG else ""
    return DataError(f"{file} cannot be read: {error.strerror or error}.{hint}")


def check_names(file: Path, columns: Sequence[str]) -> None:
    """Raise `DataError` if two columns have the same name."""
    if twice := repeated(columns):
        raise DataError(f"{file}: the header names {twice[:5]} more than once: {columns[:20]}. Rename one of them.")


def check_memory(file: Path, needed: int, what: str) -> None:
    """Raise `DataError` if a file's rows would take more than half of this machine's memory. needed: bytes."""
    if needed > (most := half_the_memory()):
        raise DataError(
            f"{file}: its {what} would take about {needed:,} bytes of memory as rows; at most {most:,} are allowed "
            f"(half of this machine's). {_TOO_LARGE}"
        )


def _content(file: Path) -> bytes:
    """A text file's bytes, if its rows will fit into memory. Raises `DataError`."""
    try:
        raw = read_given(file, half_the_memory() // 6)
    except OSError as error:
        raise unreadable(file, error) from error
    lines, marks = raw.count(b"\n"), sum(map(raw.count, (b",", b"\t", b"[", b"{", b":")))
    longest = max(map(len, raw.split(b"\n")))
    if longest > _LINE:
        raise DataError(
            f"{file} has a line of {longest:,} bytes; at most {_LINE:,} are allowed, since no example is that long. Is "
            f"it one JSON array (`jq -c '.[]'` makes lines of it), or not text?"
        )
    wide = 12 if file.suffix.lower() in (".csv", ".tsv") else 6  # the csv module keeps four bytes per letter, twice
    check_memory(file, wide * len(raw) + 400 * lines + 70 * marks, f"{len(raw):,} bytes in {lines:,} lines")
    return raw


def _json_rows(file: Path, content: str) -> Iterator[tuple[int, dict[str, object]]]:
    """(line, object) for each non-blank line."""
    advice = 'Each line must be one example such as {"text": "...", "label": 0}: repair or drop that line.'
    if content.lstrip().startswith("["):
        advice = "The file is one JSON array: convert it with `jq -c '.[]'`."
    for line, text in enumerate(content.split("\n"), start=1):  # splitlines() would also split at U+2028 and U+0085
        if not text.strip():
            continue
        try:
            value = parse_json(text)
        except ValueError as error:
            raise DataError(f"{file}, line {line} is not a JSON object on one line: {error}. {advice}") from error
        if not isinstance(value, dict):
            raise DataError(f"{file}, line {line} holds a JSON {type(value).__name__}, not an object. {advice}")
        yield line, value


def _check_returns(file: Path, content: str) -> None:
    """Raise `DataError` for a lone carriage return outside quotes in a file with other line ends: a csv writer that
    ends lines with a line feed leaves it unquoted in a field, but a reader would end the row there."""
    if content.count("\r") == content.count("\r\n"):
        return
    bare = _QUOTED.sub("", content)
    at = _LONE_RETURN.search(bare)
    if at is not None and "\n" in bare:
        near = bare[max(at.start() - 20, 0) : at.end() + 20]
        raise DataError(
            f"{file} has a lone \\r outside quotes among lines that end with \\n, near {near!r}: it may or may not end "
            f"a row. Put double quotes around the field, or remove the \\r."
        )


def _csv_rows(file: Path, content: str) -> Iterator[tuple[int, dict[str, object]]]:
    """(first line, fields by header name) for each row; None for a missing field."""
    dialect = "excel-tab" if file.suffix.lower() == ".tsv" else "excel"
    _check_returns(file, content)
    limit = csv.field_size_limit(_LINE)  # a process-wide setting, restored below
    header: list[str] = []
    count, line = 0, 1
    try:
        reader = csv.reader(io.StringIO(content, newline=""), dialect=dialect, strict=True)
        for fields in reader:
            if fields and header:
                count += 1
                if len(fields) > len(header):
                    raise DataError(
                        f"{file}, row {count}, line {line} has {len(fields)} fields, but the header has {len(header)}: "
                        f"{header[:20]}. A field that contains the separator must be in double quotes."
                    )
                yield line, dict(zip_longest(header, fields))
            elif fields:
                header = fields
                check_names(file, header)
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{file}, row starting at line {line}: {error}. A field that begins with a double quote must end with one, "
            f"and quotes inside it are doubled. Is this a file without quoting, as GLUE's .tsv are? Write it as .jsonl."
        ) from error
    finally:
        csv.field_size_limit(limit)
