"""The parts of a Flower record by kind, without Flower's own accessors.

`RecordDict.array_records` and the like create an object that refers to itself and to the record. Python frees such a
cycle only at its next search for cycles, which it starts by the number of objects, not by their size. A server held
some ten adapters that way.
"""

from __future__ import annotations

from typing import TypeVar

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

T = TypeVar("T", ArrayRecord, ConfigRecord, MetricRecord)


def parts(record: RecordDict, kind: type[T]) -> dict[str, T]:
    """Name -> each part of that kind; the part itself, not a copy."""
    return {name: part for name, part in record.items() if isinstance(part, kind)}


__all__ = ["parts"]
