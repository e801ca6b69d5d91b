"""Typed tables, from the extra `hub`: Parquet files, `datasets.Dataset` objects, data sets on the Hugging Face hub.

A ClassLabel column is returned as class names.
"""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedlora.data.tables import Table, check_memory, check_names, unreadable
from fedlora.errors import DataError, repeated
from fedlora.given_files import half_the_memory, opened, parse_json

PREFIX = "hf://"
_AT_ONCE = 256  # the most Parquet rows per batch: we check each batch's memory before reading the next
_PARTS = ("config", "split", "revision")
_Classes = Mapping[str, tuple[str, ...]]


def is_hub(source: object) -> bool:
    """Whether a source is the address of a hub data set rather than a file."""
    return isinstance(source, str | os.PathLike) and str(source).startswith(PREFIX)


def parquet_table(file: Path, columns: Iterable[str]) -> Table:
    """Those of these columns that a Parquet file has. Raises `DataError`."""
    try:
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError as error:
        raise DataError(f"{file}: Parquet needs the library pyarrow: pip install 'fedlora[hub]'.") from error
    try:
        with opened(file) as stream:
            found = pyarrow.parquet.ParquetFile(stream)
            facts = found.metadata
            groups = [facts.row_group(k) for k in range(facts.num_row_groups)]
            size = sum(group.total_byte_size for group in groups)
            needed = 6 * size + 70 * facts.num_rows * (5 + facts.num_columns)
            check_memory(file, needed, f"{facts.num_rows:,} rows")
            names = found.schema_arrow.names
            check_names(file, names)
            classes = _classes_written(file, found.schema_arrow.metadata or {})
            values: dict[str, list[Any]] = {name: [] for name in names if name in set(columns)}
            taken = 0  # a value that a dictionary stores once can take memory in every row,
            # and a single row can be as large as everything its columns store in a group
            row = max((group.total_byte_size for group in groups), default=0)
            at_once = max(1, min(_AT_ONCE, half_the_memory() // (8 * row + 1)))
            check_memory(file, 4 * row, "largest row")
            for batch in found.iter_batches(at_once, columns=list(values)) if values else ():
                for name in values:
                    values[name] += (rows := batch.column(name).to_pylist())
                    taken += sum(len(value) if isinstance(value, str | bytes) else 8 for value in rows)
                check_memory(file, 4 * taken, f"first {len(values[name]):,} rows")
    except pyarrow.ArrowException as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{file} cannot be read as Parquet: {reason}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{file} holds text that is not UTF-8 ({error}). Write it again.") from error
    except OSError as error:
        raise unreadable(file, error) from error
    if any(len(cells) != facts.num_rows for cells in values.values()):
        count = min(map(len, values.values()))
        raise DataError(f"{file} announces {facts.num_rows:,} rows but holds {count:,}: it is damaged. Write it again.")
    return _table(str(file), names, facts.num_rows, values, classes)


def dataset_table(dataset: Any, columns: Iterable[str], name: str = "the data set") -> Table:
    """Those of these columns that a `datasets.Dataset` has. Raises `DataError`."""
    if isinstance(dataset, Mapping):
        raise DataError(f"{name} is a dictionary of the splits {sorted(dataset)}; use one of them: data['train'].")
    if not hasattr(dataset, "column_names") or not hasattr(dataset, "__len__"):
        raise DataError(
            f"{name} is a {type(dataset).__name__}, not a datasets.Dataset: the rows of a stream cannot be counted and "
            f"distributed. Load it without streaming=True."
        )
    values = {c: [_plain(value) for value in dataset[c]] for c in dataset.column_names if c in columns}
    classes = {c: tuple(getattr(dataset.features[c], "names", None) or ()) for c in values}
    return _table(name, dataset.column_names, len(dataset), values, classes)


def hub_table(address: str, columns: Iterable[str]) -> Table:
    """These columns of "hf://owner/name?config=...&split=...&revision=..."; the split defaults to "train".

    Raises:
        DataError: no such address, `datasets` is not installed, or the hub cannot be reached (reported within seconds).
    """
    name, config, split, revision = hub_source(address)
    where = f"the data set {'/'.join(filter(None, (name, config)))}, split {split!r}"
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError("data from the hub needs the library datasets: pip install 'fedlora[hub]'.") from error
    try:
        _reach_the_hub()
        found = load_dataset(name, config, split=split, revision=revision)
    except Exception as error:  # datasets passes on any transport exception
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"{where} cannot be loaded from the hub: {reason}. Offline, give local files instead (a .parquet file of "
            f"the data set will do), or set HF_HUB_OFFLINE=1 to read what was loaded here before."
        ) from error
    return dataset_table(found, columns, where)


def hub_source(address: str) -> tuple[str, str | None, str, str | None]:
    """An address's name, config, split and revision. Raises `DataError` for any other query parameter."""
    name, _, query = address.removeprefix(PREFIX).partition("?")
    try:
        pairs = urllib.parse.parse_qsl(query, strict_parsing=True, keep_blank_values=True) if query else []
    except ValueError:
        pairs = [(query, "")]
    parts = dict(pairs)
    odd = [key for key, value in pairs if key not in _PARTS or not value]
    if odd or not name or len(parts) < len(pairs):
        raise DataError(
            f"{address!r} is not the address of a data set: write hf://owner/name, followed if needed by "
            f"?config=...&split=...&revision=..." + (f"; {odd[0]!r} is none of these, or has no value." if odd else ".")
        )
    return name, parts.get("config"), parts.get("split", "train"), parts.get("revision")


def _reach_the_hub() -> None:
    """One request: without a network, `datasets` would retry for half a minute."""
    from huggingface_hub import constants, get_session

    if not constants.HF_HUB_OFFLINE:
        get_session().head(constants.ENDPOINT, timeout=5)


def _table(
    name: str, columns: Sequence[str], count: int, values: Mapping[str, Sequence[object]], classes: _Classes
) -> Table:
    """values: column -> its cells. classes: column -> class names; empty for a column without classes."""
    rows = [(f"row {k + 1}", {c: cells[k] for c, cells in values.items()}) for k in range(count)]
    named = {c: names for c, names in classes.items() if names and c in values}
    for where, row in rows:
        for column, names in named.items():
            row[column] = _name_of_class(f"{name}, {where}: {column!r}", row[column], names)
    return Table(name, tuple(columns), rows, named)


def _name_of_class(place: str, value: object, names: tuple[str, ...]) -> str | None:
    if value is None:
        return None
    if not (isinstance(value, int) and 0 <= value < len(names)):
        raise DataError(
            f"{place} is {value}, but its classes are 0..{len(names) - 1} ({', '.join(names[:5])}"
            f"{', ...' if len(names) > 5 else ''}). Is it an unlabelled split?"
        )
    return names[value]


def _classes_written(file: Path, metadata: Mapping[bytes, bytes]) -> _Classes:
    """Column -> names by index, from the ClassLabel metadata that `datasets` writes into Parquet files."""
    try:
        features = parse_json(metadata.get(b"huggingface", b"{}")).get("info", {}).get("features") or {}
        kinds = {
            column: kind["names"]
            for column, kind in features.items()
            if isinstance(kind, dict) and kind.get("_type") == "ClassLabel" and kind.get("names") is not None
        }
        for column, names in kinds.items():
            if not isinstance(names, list) or not all(isinstance(n, str) for n in names) or repeated(names):
                raise ValueError(f"the classes of {column!r} are {str(names)[:100]}, but must be distinct texts")
    except (ValueError, AttributeError) as error:
        raise DataError(
            f"{file}: the library datasets' metadata on its columns cannot be read ({error}). Write it again."
        ) from error
    return {column: tuple(names) for column, names in kinds.items()}


def _plain(value: Any) -> Any:
    """A Python number or text, even if the data set returns NumPy or torch values."""
    return value.item() if getattr(value, "ndim", None) == 0 else value
