"""Flower's records over a local connection: a JSON header, then each array. Needs neither torch nor pickle."""

from __future__ import annotations

import json
from multiprocessing.connection import Connection
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict


def send_message(connection: Connection, said: dict[str, Any], record: RecordDict | None = None) -> None:
    """Send one message: a small JSON object, and records."""
    arrays: list[bytes] = []
    records: dict[str, Any] = {}
    for name, part in (record or {}).items():
        if isinstance(part, ArrayRecord):
            records[name] = {"arrays": [[key, one.dtype, list(one.shape), one.stype] for key, one in part.items()]}
            arrays += [one.data for one in part.values()]
        else:
            records[name] = {"metrics" if isinstance(part, MetricRecord) else "config": dict(part)}
    connection.send_bytes(json.dumps({"said": said, "records": records if record is not None else None}).encode())
    for data in arrays:
        connection.send_bytes(data)


def receive_message(connection: Connection) -> tuple[dict[str, Any], RecordDict | None]:
    """The other side's message. Raises `OSError` or `EOFError` if the connection broke."""
    header = json.loads(connection.recv_bytes())
    if header["records"] is None:
        return header["said"], None
    record = RecordDict()
    for name, part in header["records"].items():
        if "arrays" in part:
            record[name] = ArrayRecord({
                key: Array(dtype, tuple(shape), stype, connection.recv_bytes())
                for key, dtype, shape, stype in part["arrays"]
            })  # fmt: skip
        elif "metrics" in part:
            record[name] = MetricRecord(part["metrics"])
        else:
            record[name] = ConfigRecord(part["config"])
    return header["said"], record
