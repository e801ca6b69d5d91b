"""Tables of text: CSV, TSV and JSONL files, Parquet files and objects of `datasets`, data sets of the hub.

Nothing is guessed. The csv module and our JSON parser read text files; pandas silently drops a surplus field, turns a
missing one into "", skips blank lines, and renames columns. Each row keeps its place for error messages.
"""

from __future__ import annotations

import csv
import difflib
import io
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlora.data.hub import hub_data_set, is_hub
from fedlora.errors import DataError, repeated
from fedlora.given_files import half_the_memory, opened, parse_json, read_given

if TYPE_CHECKING:
    from datasets import Dataset

_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_FIELD = 2**24  # letters in one field; a book has one million

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
                near = difflib.get_close_matches(column, self.columns, n=1, cutoff=0.5)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise DataError(f"{self.name} has no column {column!r}; it has {list(self.columns[:20])}.{hint}")
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


def readable(place: str, value: object) -> str:
    """`value` as a string that a tokeniser can read. Raises `DataError`, whose message begins with `place`."""
    if not isinstance(value, str):
        raise DataError(f"{place} must be a string; got {type(value).__name__} {value!r}.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place} holds half of a surrogate pair at character {error.start}, which no tokeniser can read: the text "
            f"was cut inside an emoji or the like. Repair the row."
        ) from error
    return value


def open_table(source: str | os.PathLike[str] | Dataset, columns: Sequence[str]) -> Table:
    """A source's rows: a file by its suffix, "hf://..." or a `datasets.Dataset`.

    Args:
        columns: those to read of a typed source; text files are read whole.

    Raises:
        DataError: no such file, unknown suffix, not UTF-8, a malformed row, no rows. The message names row and line.
    """
    if is_hub(source):
        data_set, name = hub_data_set(str(source))
        return _dataset_table(data_set, columns, name)
    if not isinstance(source, str | os.PathLike):
        return _dataset_table(source, columns, "the data set")
    file = Path(source)
    suffix = file.suffix.lower()
    if suffix not in (".jsonl", ".json", ".csv", ".tsv", ".parquet"):
        raise DataError(
            f"{file}: the suffix {suffix!r} is not known. Use .jsonl or .json (one object per line), .csv, .tsv or "
            f".parquet."
        )
    try:
        if suffix == ".parquet":
            return _parquet_table(file, columns)
        content = read_given(file, half_the_memory() // 6).decode("utf-8-sig")
    except FileNotFoundError as error:
        begin = "" if file.is_absolute() else f" Relative paths start at the working directory, {Path.cwd()}."
        raise DataError(f"{file} does not exist.{begin}") from error
    except UnicodeDecodeError as error:
        wide = error.object.startswith((b"\xff\xfe", b"\xfe\xff"))
        raise DataError(
            f"{file} is not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start}. Convert it, for "
            f"example with `iconv -f {'utf-16' if wide else 'cp1252'} -t utf-8`."
        ) from error
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}.") from error
    if suffix in _SEPARATORS:
        header, found = _csv_rows(file, content, _SEPARATORS[suffix])
    else:
        found = _json_rows(file, content)
        header = list(dict.fromkeys(name for _, row in found for name in row))
    return Table(str(file), tuple(header), [(f"row {k}, line {n}", row) for k, (n, row) in enumerate(found, start=1)])


# ---------------------------------------------------------------------------------------------------------- text files


def _json_rows(file: Path, content: str) -> list[tuple[int, dict[str, object]]]:
    """(line, object) for each line that is not blank."""
    advice = 'Each line must be one example such as {"text": "...", "label": 0}: repair or drop that line.'
    if content.lstrip().startswith("["):
        advice = "The file is one JSON array: convert it with `jq -c '.[]'`."
    rows = []
    for line, text in enumerate(content.split("\n"), start=1):  # splitlines() would also split at U+2028 and U+0085
        if not text.strip():
            continue
        try:
            value = parse_json(text)
        except ValueError as error:
            raise DataError(f"{file}, line {line} is not a JSON object on one line: {error}. {advice}") from error
        if not isinstance(value, dict):
            raise DataError(f"{file}, line {line} holds a JSON {type(value).__name__}, not an object. {advice}")
        rows.append((line, value))
    return rows


def _csv_rows(file: Path, content: str, separator: str) -> tuple[list[str], list[tuple[int, dict[str, object]]]]:
    """The header, and (first line, fields by header name) for each row; None for a missing field."""
    _check_separator(file, content, separator)
    limit = csv.field_size_limit(_FIELD)  # a process-wide setting, restored below
    header: list[str] = []
    rows: list[tuple[int, dict[str, object]]] = []
    line = 1
    try:
        reader = csv.reader(io.StringIO(content, newline=""), delimiter=separator, strict=True)
        for fields in reader:
            if fields and header:
                if len(fields) > len(header):
                    raise DataError(
                        f"{file}, row {len(rows) + 1}, line {line} has {len(fields)} fields, but the header has "
                        f"{len(header)}: {header[:20]}. A field that contains the separator must be in double quotes."
                    )
                rows.append((line, dict(zip_longest(header, fields))))
            elif fields:
                header = fields
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{file}, row starting at line {line}: {error}. A field that begins with a double quote must end with one, "
            f"and quotes inside it are doubled. Is this a file without quoting, as GLUE's .tsv are? Write it as .jsonl."
        ) from error
    finally:
        csv.field_size_limit(limit)
    return header, rows


def _check_separator(file: Path, content: str, separator: str) -> None:
    """Raises `DataError` if the header has more of another mark between its names: Excel writes semicolons where
    numbers have decimal commas, and a first line `sep=;`."""
    first = next((line for line in content.split("\n") if line.strip()), "").strip()
    bare = re.sub(r'"[^"]*"', "", first)
    counts = {mark: bare.count(mark) for mark in ",;\t|"}
    mark = max(counts, key=lambda one: (counts[one], one == separator))
    if first.startswith("sep=") or mark != separator:
        raise DataError(
            f"{file}: its first line, {first[:60]!r}, has {mark!r} between the columns; a .csv has commas, a .tsv has "
            f"tabs. Save it with {separator!r}, and without a line that begins with sep=."
        )


# ------------------------------------------------------------------------------------------------------- typed sources


def _parquet_table(file: Path, columns: Sequence[str]) -> Table:
    """Those of these columns that a Parquet file has."""
    try:
        import pyarrow.parquet  # type: ignore[import-untyped]
        from datasets import Dataset
        from datasets.table import InMemoryTable
    except ImportError as error:
        raise DataError(f"{file}: Parquet needs pyarrow and datasets: pip install 'fedlora[hub]'.") from error
    try:
        with opened(file) as stream:
            found = pyarrow.parquet.ParquetFile(stream)
            names = found.schema_arrow.names
            if twice := repeated(names):
                raise DataError(f"{file}: the header names {twice[:5]} more than once. Rename one of them.")
            table = found.read(columns=[name for name in names if name in set(columns)])
            table.validate(full=True)
        if table.num_rows != found.metadata.num_rows:
            raise ValueError(f"it announces {found.metadata.num_rows:,} rows but holds {table.num_rows:,}")
        read = _dataset_table(Dataset(InMemoryTable(table)), columns, str(file))
    except (DataError, FileNotFoundError):
        raise
    except OSError as error:
        if error.strerror:
            raise
        raise DataError(f"{file} cannot be read as Parquet: {_first_line(error)}") from error
    except Exception as error:  # pyarrow and datasets raise whatever a damaged file makes them stumble over
        raise DataError(f"{file} cannot be read as Parquet: {_first_line(error)}") from error
    return Table(read.name, tuple(names), read.rows, read.classes)


def _dataset_table(dataset: Any, columns: Sequence[str], name: str) -> Table:
    """Those of these columns that a `datasets.Dataset` has. A ClassLabel column is returned as class names."""
    if isinstance(dataset, Mapping):
        raise DataError(f"{name} is a dictionary of the splits {sorted(dataset)}; use one of them: data['train'].")
    if not hasattr(dataset, "column_names") or not hasattr(dataset, "__len__"):
        raise DataError(
            f"{name} is a {type(dataset).__name__}, not a datasets.Dataset: the rows of a stream cannot be counted and "
            f"distributed. Load it without streaming=True."
        )
    values = {c: [_plain(value) for value in dataset[c]] for c in dataset.column_names if c in columns}
    classes = {c: tuple(names) for c in values if (names := getattr(dataset.features[c], "names", None))}
    rows: Rows = [(f"row {k + 1}", {c: cells[k] for c, cells in values.items()}) for k in range(len(dataset))]
    for where, row in rows:
        for column, names in classes.items():
            row[column] = _name_of_class(f"{name}, {where}: {column!r}", row[column], names)
    return Table(name, tuple(dataset.column_names), rows, classes)


def _name_of_class(place: str, value: object, names: tuple[str, ...]) -> str | None:
    if value is None:
        return None
    if not (isinstance(value, int) and 0 <= value < len(names)):
        raise DataError(
            f"{place} is {value}, but its classes are 0..{len(names) - 1} ({', '.join(names[:5])}"
            f"{', ...' if len(names) > 5 else ''}). Is it an unlabelled split?"
        )
    return names[value]


def _plain(value: Any) -> Any:
    """A Python number or text, even if the data set returns NumPy or torch values."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _first_line(error: Exception) -> str:
    return f"{(str(error) or type(error).__name__).splitlines()[0].rstrip('.')}. Write it again."
