"""Rows of JSONL, CSV and Parquet files, each with its place for error messages. Nothing is guessed or skipped."""

from __future__ import annotations

import csv
import difflib
import io
import os
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from fedlora.data.strict_json import parse_json
from fedlora.errors import DataError, repeated
from fedlora.given_files import half_the_memory, read_given

_LINE = 2**24  # bytes of one row's text; a book has one million
_TOO_LARGE = "Is it the right file? If so, split it, and give each client its part."

Rows = list[tuple[str, dict[str, object]]]  # (where, {column: value})


def read_table(path: str | os.PathLike[str], columns: Sequence[str]) -> Rows:
    """The rows of a JSONL, CSV or Parquet file as (where, {column: value}), with no value of `columns` missing.

    Use it under a reader of your own; `where` ("row 3, line 4") is for error messages. A Parquet column of the type
    ClassLabel of `datasets` comes as the names of its classes.

    Args:
        path: a UTF-8 file (a byte order mark is dropped), .jsonl / .json / .csv / .tsv, or .parquet.
        columns: the columns that every row must have; others come along unchecked.

    Raises:
        DataError: as `read_classification`, but for types of values and labels.
    """
    file = Path(path)
    suffix = file.suffix.lower()
    if suffix not in (".jsonl", ".json", ".csv", ".tsv", ".parquet"):
        raise DataError(
            f"{file}: the suffix {suffix!r} is not known. Use .jsonl or .json (one object per line), .csv, .tsv or "
            f".parquet."
        )
    if not file.exists() or file.is_dir():
        what = "is a folder, not a file" if file.is_dir() else "does not exist"
        begin = (
            "in a config file at its own folder" if file.is_absolute() else f"at the working directory, {Path.cwd()}"
        )
        raise DataError(f"{file} {what}. Relative paths start {begin}.")
    if suffix == ".parquet":
        return checked(file, _parquet_rows(file), columns)
    try:
        content = _content(file).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start}. Convert it, for "
            f"example with `iconv -f cp1252 -t utf-8`."
        ) from error
    rows = _json_rows(file, content) if suffix in (".jsonl", ".json") else _csv_rows(file, content, suffix)
    if not rows:
        raise DataError(f"{file} holds no rows ({len(content)} characters). Was it written to the end?")
    return checked(file, rows, columns)


def checked(source: object, rows: Rows, columns: Sequence[str]) -> Rows:
    """`rows`, where every one of them has all of `columns`. Raises `DataError` with the place, as `read_table`."""
    present = list(dict.fromkeys(name for _, row in rows for name in row))
    for column in columns:
        if column not in present:
            near = difflib.get_close_matches(column, present, n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            between = [mark for mark in ";\t|" if len(present) == 1 and mark in present[0]]
            if between:
                hint = f" Is {between[0]!r} meant to stand between columns? A .csv has commas, a .tsv has tabs."
            raise DataError(f"{source} has no column {column!r}; it has {present[:20]}.{hint}")
    for where, row in rows:
        for column in columns:
            value = row.get(column)
            if value is None or (isinstance(value, str) and not value.strip()):
                state = "missing" if value is None else "empty"
                raise DataError(f"{source}, {where}: {column!r} is {state}. Fill it in, or drop the row.")
    return rows


def class_names(path: str | os.PathLike[str], column: str) -> tuple[str, ...] | None:
    """The names of a column's classes by index, where the file holds them: a ClassLabel in Parquet. Else None."""
    file = Path(path)
    if file.suffix.lower() != ".parquet" or not file.is_file():
        return None
    return _class_labels(file, _parquet(file).schema).get(column)


def _content(file: Path) -> bytes:
    """The bytes of a text file whose rows will fit into memory. Raises `DataError`."""
    most = half_the_memory()
    try:
        raw = read_given(file, most // 6)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}. {_TOO_LARGE}") from error
    lines, marks = raw.count(b"\n"), sum(map(raw.count, (b",", b"\t", b"[", b"{", b":")))
    longest = max(map(len, raw.split(b"\n")))
    if longest > _LINE:
        raise DataError(
            f"{file} has a line of {longest:,} bytes, and {_LINE:,} are allowed: no example is that long. Is it one "
            f"JSON array (`jq -c '.[]'` makes lines of it), or no text at all?"
        )
    wide = 12 if file.suffix.lower() in (".csv", ".tsv") else 6  # the csv module keeps four bytes a letter, twice
    needed = wide * len(raw) + 400 * lines + 70 * marks
    if needed > most:
        raise DataError(
            f"{file}: its {len(raw):,} bytes in {lines:,} lines take some {needed:,} bytes of memory as rows, and "
            f"{most:,} are allowed (half of this machine's). {_TOO_LARGE}"
        )
    return raw


def _parquet(file: Path) -> Any:
    try:
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError as error:
        raise DataError(f"{file}: Parquet needs the library pyarrow: pip install 'fedlora[hub]'.") from error
    try:
        facts, most = pyarrow.parquet.ParquetFile(file).metadata, half_the_memory()
        groups = [facts.row_group(k) for k in range(facts.num_row_groups)]
        needed = 6 * sum(group.total_byte_size for group in groups) + 70 * facts.num_rows * (5 + facts.num_columns)
        if needed > most:
            raise DataError(
                f"{file}: its {facts.num_rows:,} rows take some {needed:,} bytes of memory, and {most:,} are allowed "
                f"(half of this machine's). {_TOO_LARGE}"
            )
        return pyarrow.parquet.read_table(file)
    except (OSError, pyarrow.ArrowException) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{file} cannot be read as Parquet: {reason}") from error


def _parquet_rows(file: Path) -> Rows:
    table = _parquet(file)
    if not table.num_rows:
        raise DataError(f"{file} holds no rows. Was it written to the end?")
    named = _class_labels(file, table.schema)
    rows: Rows = [(f"row {k + 1}", row) for k, row in enumerate(table.to_pylist())]
    for where, row in rows:
        for column, names in named.items():
            row[column] = name_of_class(file, where, column, row[column], names)
    return rows


def name_of_class(source: object, where: str, column: str, value: object, names: tuple[str, ...]) -> str | None:
    """The name of a class by its index. Raises `DataError` where it has none."""
    if value is None:
        return None
    if not (isinstance(value, int) and 0 <= value < len(names)):
        raise DataError(
            f"{source}, {where}: {column!r} is {value}, and its classes are 0..{len(names) - 1} ({', '.join(names[:5])}"
            f"{', ...' if len(names) > 5 else ''}). Is it an unlabelled split?"
        )
    return names[int(value)]


def _class_labels(file: Path, schema: Any) -> dict[str, tuple[str, ...]]:
    """Column -> names by index, of what `datasets` has written as ClassLabel into a Parquet file."""
    try:
        written = parse_json((schema.metadata or {}).get(b"huggingface", b"{}").decode())
        features = written.get("info", {}).get("features") or {}
    except (ValueError, AttributeError) as error:
        raise DataError(
            f"{file}: what the library datasets has written of its columns cannot be read ({error}). Write it again."
        ) from error
    return {
        column: tuple(kind["names"])
        for column, kind in features.items()
        if isinstance(kind, dict) and kind.get("_type") == "ClassLabel" and kind.get("names")
    }


def _json_rows(file: Path, content: str) -> Rows:
    rows: Rows = []
    for number, line in enumerate(content.split("\n"), start=1):  # not splitlines(): U+2028, U+0085 may stand in a text
        if not line.strip():
            continue
        try:
            value = parse_json(line)
        except ValueError as error:
            array = content.lstrip().startswith("[")
            advice = (
                "The file is one JSON array: convert it with `jq -c '.[]'`." if array else "Mend or drop that line."
            )
            raise DataError(f"{file}, line {number} is not a JSON object on one line: {error}. {advice}") from error
        if not isinstance(value, dict):
            raise DataError(
                f"{file}, line {number} holds a JSON {type(value).__name__}, not an object. Each line must be one "
                f'example such as {{"text": "...", "label": 0}}; `jq -c \'.[]\'` makes that of an array.'
            )
        rows.append((f"row {len(rows) + 1}, line {number}", value))
    return rows


def _csv_rows(file: Path, content: str, suffix: str) -> Rows:
    rows: Rows = []
    header: list[str] | None = None
    previous = csv.field_size_limit(_LINE)  # a setting of the process, so it is put back
    try:
        source = io.StringIO(content, newline="")
        reader = csv.reader(source, dialect="excel-tab" if suffix == ".tsv" else "excel", strict=True)
        line = 1
        for fields in reader:
            if fields and header is None:
                header = fields
                twice = repeated(header)
                if twice:
                    raise DataError(
                        f"{file}: the header names {twice[:5]} more than once: {header[:20]}. Rename one of them."
                    )
            elif fields and header is not None:
                where = f"row {len(rows) + 1}, line {line}"
                if len(fields) > len(header):
                    raise DataError(
                        f"{file}, {where} has {len(fields)} fields, but the header has {len(header)}: {header[:20]}. "
                        f"A field that contains the separator must stand in double quotes."
                    )
                rows.append((where, dict(zip_longest(header, fields))))
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{file}, row starting at line {line}: {error}. A field that begins with a double quote must end with one, "
            f"and quotes inside it are doubled. Is this a file without quoting, as GLUE's .tsv are? Write it as .jsonl."
        ) from error
    finally:
        csv.field_size_limit(previous)
    return rows
