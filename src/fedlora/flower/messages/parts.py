"""The parts of a Flower record by their kind, without Flower's own way to them.

`RecordDict.array_records` and its like make an object that refers to itself and to the record: nothing of the record is
freed before Python looks for such circles, which it does by the number of objects, however large they are. A server
held some ten adapters so.
"""

from __future__ import annotations

from typing import TypeVar

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

T = TypeVar("T", ArrayRecord, ConfigRecord, MetricRecord)


def parts(record: RecordDict, kind: type[T]) -> dict[str, T]:
    """Name -> each part of that kind; the part itself, not a copy."""
    return {name: part for name, part in record.items() if isinstance(part, kind)}


__all__ = ["parts"]
