"""Tables of text: CSV, TSV, JSONL and Parquet files, and objects of `datasets`.

The csv module and our JSON parser read text files; pandas silently drops a surplus field, turns a missing one into "",
skips blank lines, and renames columns. Each row keeps its place for error messages.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlora.data.hub import first_line
from fedlora.errors import DataError, counted, repeated
from fedlora.given_files import DATA, opened, parse_json, read_given

if TYPE_CHECKING:
    from datasets import Dataset

_SEPARATORS = {".csv": ",", ".tsv": "\t"}  # the usual ones

Rows = list[tuple[str, dict[str, object]]]  # (where, {column: value})


@dataclass(frozen=True)
class Table:
    """One source's rows, unchanged.

    Args:
        name: the source's, for error messages.
        columns: all of the source's columns; a typed source's rows hold only the requested ones.
        rows: each row's (where, {column: value}); `where` is like "row 3, line 4".
        classes: column -> its classes by index, if the source names them. The column's values are then these names.

    Raises:
        DataError: there are no rows, or two columns have one name.
    """

    name: str
    columns: tuple[str, ...]
    rows: Rows
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if twice := repeated(self.columns):
            raise DataError(f"{self.name}: the header names {twice[:5]} more than once. Rename one of them.")
        if not self.rows:
            raise DataError(f"{self.name} holds no rows. Was it written completely?")

    def having(self, columns: Sequence[str]) -> Table:
        """Itself. Raises `DataError` if a column is missing, or a row has no value in one of them."""
        for column in columns:
            if column not in self.columns:
                raise DataError(f"{self.name} has no column {column!r}; it has {list(self.columns[:20])}.")
            empty = [where for where, row in self.rows if row.get(column) is None or not str(row[column]).strip()]
            if empty:
                raise DataError(
                    f"{self.name}, {_all_of(empty)}: {column!r} is empty or missing. Fill it in, or drop the row."
                )
        return self

    def cells(self, column: str) -> list[tuple[str, object]]:
        """Each row's (where, value)."""
        return [(where, row[column]) for where, row in self.rows]

    def texts(self, column: str) -> tuple[str, ...]:
        """A column's values. Raises `DataError` if one is not a string."""
        found = []
        for where, value in self.cells(column):
            if not isinstance(value, str):
                raise DataError(
                    f"{self.name}, {where}: {column!r} must be a string; got {type(value).__name__} {value!r:.60}."
                )
            found.append(value)
        return tuple(found)


def open_table(source: str | os.PathLike[str] | Dataset, columns: Sequence[str] | None = None) -> Table:
    """A source's rows: a file by its suffix, or a `datasets.Dataset`.

    Args:
        columns: those to read of a typed source; None: all. Text files are read whole.

    Raises:
        DataError: no such file, unknown suffix, not UTF-8, malformed rows, no rows. The message names row and line.
    """
    if not isinstance(source, str | os.PathLike):
        return _dataset_table(source, columns)
    file = Path(source)
    suffix = file.suffix.lower()
    if suffix not in (".jsonl", ".json", ".csv", ".tsv", ".parquet"):
        raise DataError(f"{file}: the suffix {suffix!r} is not .jsonl, .json (an object a line), .csv, .tsv, .parquet.")
    try:
        if suffix == ".parquet":
            return _parquet_table(file, columns)
        content = read_given(file, DATA).decode("utf-8-sig")
    except FileNotFoundError as error:
        begin = "" if file.is_absolute() else f" Relative paths start at the working directory, {Path.cwd()}."
        raise DataError(f"{file} does not exist.{begin}") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is not UTF-8: {error}. Convert it, for example with `iconv -f cp1252 -t utf-8`, or -f utf-16."
        ) from error
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}.") from error
    if suffix in _SEPARATORS:
        return _csv_table(str(file), content, _SEPARATORS[suffix])
    return _json_table(str(file), content)


def _all_of(places: Sequence[str]) -> str:
    """The first places, and how many there are."""
    return "; ".join(places[:5]) + (f"; ... ({len(places)} such rows)" if len(places) > 5 else "")


# ---------------------------------------------------------------------------------------------------------- text files


def _json_table(name: str, content: str) -> Table:
    """An object for each line that is not blank."""
    advice = 'Each line must be one example such as {"text": "...", "label": 0}: repair or drop that line.'
    if content.lstrip().startswith("["):
        advice = "The file is one JSON array: convert it with `jq -c '.[]'`."
    rows: Rows = []
    for line, text in enumerate(content.split("\n"), start=1):  # splitlines() would also split at U+2028 and U+0085
        if text.strip():
            try:
                value = parse_json(text)
                if not isinstance(value, dict):
                    raise ValueError(f"it holds a {type(value).__name__}")
            except ValueError as error:
                raise DataError(f"{name}, line {line} is not a JSON object on one line: {error}. {advice}") from error
            rows.append((f"row {len(rows) + 1}, line {line}", value))
    return Table(name, tuple(dict.fromkeys(column for _, row in rows for column in row)), rows)


def _csv_table(name: str, content: str, usual: str) -> Table:
    """The rows by the header's names, each with the line where it begins. Lines without a field are skipped."""
    separator, line = _separator(content, usual), 1
    found: list[tuple[int, list[str]]] = []
    reader = csv.reader(io.StringIO(content, newline=""), delimiter=separator, strict=True)
    try:
        for fields in reader:
            if fields:
                found.append((line, fields))
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{name}, row starting at line {line}: {error}. A field that begins with a double quote must end with one, "
            f"and quotes inside it are doubled. A file without quoting (GLUE's .tsv) or with longer fields: as .jsonl."
        ) from error
    header, rows = (found[0][1], found[1:]) if found else ([], [])
    places = [f"row {k}, line {at}" for k, (at, _) in enumerate(rows, start=1)]
    counts = zip(places, (len(fields) for _, fields in rows), strict=True)
    if odd := [f"{at} has {counted(count, 'field')}" for at, count in counts if count != len(header)]:
        hint = f"A field that contains the separator {separator!r} must be in double quotes."
        raise DataError(f"{name}: {_all_of(odd)}, but the header has {len(header)}: {header[:20]}. {hint}")
    made = [dict[str, object](zip(header, fields, strict=True)) for _, fields in rows]
    return Table(name, tuple(header), list(zip(places, made, strict=True)))


def _separator(content: str, usual: str) -> str:
    """The mark that the header has most often outside of quotes, the usual one among equals: Excel writes semicolons
    where numbers have decimal commas. With a wrong one, the columns that are asked for are not in the header."""
    head = next((line for line in content.split("\n") if line.strip()), "")
    bare = re.sub(r'"[^"]*"', "", head)
    marks: list[str] = [usual, *",;\t|"]
    return max(marks, key=lambda mark: bare.count(mark))


# ------------------------------------------------------------------------------------------------------- typed sources


def _parquet_table(file: Path, columns: Sequence[str] | None) -> Table:
    """Those of these columns that a Parquet file has."""
    try:
        import pyarrow.parquet
        from datasets import Dataset
    except ImportError as error:
        raise DataError(f"{file}: Parquet needs pyarrow and datasets: pip install 'fedlora[hub]'.") from error
    with opened(file) as stream:
        try:
            return _dataset_table(Dataset(pyarrow.parquet.read_table(stream)), columns, str(file))
        except DataError:
            raise
        except Exception as error:  # pyarrow and datasets raise whatever a damaged file makes them stumble over
            raise DataError(f"{file} cannot be read as Parquet: {first_line(error)}. Write it again.") from error


def _dataset_table(dataset: Any, columns: Sequence[str] | None, name: str = "the data set") -> Table:
    """Those of these columns that a `datasets.Dataset` has. A ClassLabel column is returned as class names."""
    if not hasattr(dataset, "column_names") or not hasattr(dataset, "__len__") or isinstance(dataset, Mapping):
        raise DataError(
            f"{name} is a {type(dataset).__name__}, not a datasets.Dataset: give one split, such as data['train'], "
            f"loaded without streaming=True."
        )
    dataset = dataset.with_format(None)  # Python's numbers, whatever format the user set
    values = {c: list(dataset[c]) for c in dataset.column_names if columns is None or c in columns}
    classes = {c: tuple(names) for c in values if (names := getattr(dataset.features[c], "names", None))}
    for column, names in classes.items():
        if unlabelled := next((k for k, v in enumerate(values[column], start=1) if v == -1), None):
            raise DataError(f"{name}, row {unlabelled}: {column!r} is -1, no class. Is it an unlabelled split?")
        values[column] = [None if v is None else names[v] for v in values[column]]
    rows: Rows = [(f"row {k + 1}", {c: cells[k] for c, cells in values.items()}) for k in range(len(dataset))]
    return Table(name, tuple(dataset.column_names), rows, classes)
