"""Flower's records as bytes for a local socket: a JSON header and the arrays. Needs neither torch nor pickle."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

_MOST = 1 << 36  # bytes in one message
_LENGTH = struct.Struct("<QQ")


def send_message(connection: socket.socket, said: dict[str, Any], record: RecordDict | None = None) -> None:
    """Send one message: a small JSON object, and records."""
    arrays: list[bytes] = []
    records: dict[str, Any] = {}
    for name, part in (record or {}).items():
        if isinstance(part, ArrayRecord):
            listed = []
            for key, array in part.items():
                listed.append([key, array.dtype, list(array.shape), array.stype, len(array.data)])
                arrays.append(array.data)
            records[name] = {"arrays": listed}
        else:
            records[name] = {"metrics" if isinstance(part, MetricRecord) else "config": dict(part)}
    header = json.dumps({"said": said, "records": records if record is not None else None}).encode()
    connection.sendall(_LENGTH.pack(len(header), sum(map(len, arrays))) + header)
    for data in arrays:
        connection.sendall(data)


def receive_message(connection: socket.socket) -> tuple[dict[str, Any], RecordDict | None]:
    """The other side's message. Raises `ConnectionError` if the connection broke."""
    header_size, data_size = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if header_size + data_size > _MOST:
        raise ConnectionError(f"a message of {header_size + data_size:,} bytes is not a message of fedlora.")
    header = json.loads(bytes(_exactly(connection, header_size)))
    data = memoryview(_exactly(connection, data_size))
    if header["records"] is None:
        return header["said"], None
    record, begin = RecordDict(), 0
    for name, part in header["records"].items():
        if "arrays" in part:
            arrays = {}
            for key, dtype, shape, stype, size in part["arrays"]:
                arrays[key] = Array(dtype, tuple(shape), stype, bytes(data[begin : begin + size]))
                begin += size
            record[name] = ArrayRecord(arrays)
        elif "metrics" in part:
            record[name] = MetricRecord(part["metrics"])
        else:
            record[name] = ConfigRecord(part["config"])
    return header["said"], record


def _exactly(connection: socket.socket, size: int) -> bytearray:
    content = bytearray(size)
    view, got = memoryview(content), 0
    while got < size:
        count = connection.recv_into(view[got:])
        if not count:
            raise ConnectionError(f"the other side broke off after {got:,} of {size:,} bytes.")
        got += count
    return content
