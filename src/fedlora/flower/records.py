"""Tensors, parcels and uploads as Flower's records: lossless for every float type, and checked before use.

A tensor travels as its little-endian bytes (stype "fedlora.raw"), so that bfloat16 needs no conversion and there is no
header to forge. Stock PEFT clients send numpy arrays (stype "numpy.ndarray"): only their header is read, under a size
limit, and must match what was expected. Declared type and shape are compared with the expected ones and with the actual
bytes before a tensor is made.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.lib.format as npy
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from fedlora.core.checkpoint import decoded, encoded
from fedlora.core.lora import Adapter, LoRA
from fedlora.core.messages import Client, Upload
from fedlora.core.method import Roles
from fedlora.core.parcels import Parcel
from fedlora.core.text import shown
from fedlora.flower.envelope import Receipt, RecordError, enclose, opened, parts
from fedlora.flower.terms import PROTOCOL
from fedlora.linalg.stored import stored_bytes

RAW, NUMPY = "fedlora.raw", "numpy.ndarray"
_TYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_NUMPY_TYPES = {"<f8": "float64", "<f4": "float32", "<f2": "float16"}
_HEADER = 4096  # the most bytes of a numpy header to read; real ones have 128


def to_array(tensor: Tensor) -> Array:
    """A tensor for the wire."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _TYPES:
        raise RecordError(f"tensors of {tensor.dtype} do not travel; adapters are {', '.join(_TYPES)}.")
    return Array(name, tuple(tensor.shape), RAW, bytes(stored_bytes(tensor)))


def to_tensor(array: Array, shape: Sequence[int | None], what: str) -> Tensor:
    """The tensor that travelled, if it was expected. A None in `shape`: the sender chooses that size.

    Raises:
        RecordError: another shape or type, or the wrong number of bytes for them.
    """
    declared, expected = tuple(array.shape), tuple(shape)
    if len(declared) != len(expected) or any(e not in (None, d) for d, e in zip(declared, expected, strict=True)):
        raise RecordError(f"{what} is declared with shape {declared}; it must be {_shown(expected)}.")
    if array.dtype not in _TYPES:
        raise RecordError(f"{what} is declared as {array.dtype[:20]!r}; it must be one of {', '.join(_TYPES)}.")
    dtype = _TYPES[array.dtype]
    needed = math.prod(declared) * dtype.itemsize
    begin = _after_header(array, declared, what) if array.stype == NUMPY else 0
    if array.stype not in (NUMPY, RAW):
        raise RecordError(f"{what} is packed as {array.stype[:40]!r}, which is not read.")
    if any(d < 0 for d in declared) or len(array.data) - begin != needed:
        raise RecordError(f"{what} is declared with {needed:,} bytes, and {len(array.data) - begin:,} came.")
    if not needed:
        return torch.empty(declared, dtype=dtype)
    if array.stype == NUMPY:  # maybe in Fortran's order, as a transposed array's
        return torch.from_numpy(np.load(io.BytesIO(array.data), allow_pickle=False)).contiguous()
    return torch.frombuffer(bytearray(array.data), dtype=dtype).reshape(declared)


def _after_header(array: Array, declared: tuple[int, ...], what: str) -> int:
    """The offset of a .npy's data, after its header matched the record. Nothing is allocated because of the header."""
    file = io.BytesIO(array.data[: _HEADER + 12])
    try:
        version = npy.read_magic(file)
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[version]
        shape, _, dtype = read(file, max_header_size=_HEADER)
    except Exception as error:  # a forged header can raise anything, and its sender is to blame
        raise RecordError(f"{what} has a numpy header that is not read: {shown(error, 200)}.") from error
    header = (_NUMPY_TYPES.get(dtype.str, dtype.str), shape)
    if header != (array.dtype, declared):
        raise RecordError(
            f"{what} is declared as {array.dtype} {declared}, and its header says {header[0]} {header[1]}."
        )
    return file.tell()


def _shown(shape: Sequence[int | None]) -> str:
    return f"({', '.join('any' if n is None else str(n) for n in shape)})"


# ------------------------------------------------------------------------------------------------------ to the client


def parcel_record(parcel: Parcel, run: str, terms: str = "", receipt: Receipt | None = None) -> RecordDict:
    """A client's message with a parcel. `run`: the federation's name, so that no other federation's state is used.
    terms: by which the server plays. receipt: for the client's earlier work."""
    tree, tensors = encoded(parcel)
    arrays = ArrayRecord({name: to_array(tensor) for name, tensor in tensors.items()})
    facts = {"run": run, "round": parcel.round, "parcel": tree}
    config = ConfigRecord({"parcel": json.dumps(facts, sort_keys=True), "receipt": (receipt or Receipt()).text()})
    return enclose(RecordDict({"arrays": arrays, "config": config}), terms)


def record_parcel(record: RecordDict) -> tuple[Parcel, str]:
    """The received parcel, and the federation's name. Raises `RecordError`."""
    opened(record, "the server", "this site")
    facts = _facts(record, "parcel")
    arrays = parts(record, ArrayRecord)["arrays"]
    tensors = {name: to_tensor(array, [None] * len(array.shape), name) for name, array in arrays.items()}
    try:
        return decoded(facts["parcel"], tensors, Parcel), str(facts["run"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise RecordError(f"the server's message cannot be read: {error!r}.") from error


# ------------------------------------------------------------------------------------------------------ to the server


def upload_record(
    upload: Upload, *, run: str, round: int, loss: float, kept: Sequence[str]
) -> RecordDict:  # fmt: skip
    """A client's reply. kept: the names of its own kept parts. `round` is the download's."""
    named = {
        f"{factor}/{module}": tensor
        for module, lora in upload.adapter.modules.items()
        for factor, tensor in lora.tensors().items()
    } | {f"heads/{name}": head for name, head in upload.adapter.heads.items()}
    facts = {"run": run, "round": round, "kept": list(kept)}
    record = RecordDict(
        {
            "arrays": ArrayRecord({name: to_array(tensor) for name, tensor in named.items()}),
            "metrics": MetricRecord({"num-examples": float(upload.num_examples), "loss": float(loss)}),
            "config": ConfigRecord({"upload": json.dumps(facts, sort_keys=True)}),
        }
    )
    return enclose(record)


def record_upload(
    record: RecordDict,
    client: Client,
    *,
    run: str,
    round: int,
    shapes: Mapping[str, tuple[int, int]],
    roles: Roles,
    heads: Mapping[str, Tensor],
) -> tuple[Upload, float, list[str]]:
    """(upload, mean loss, names of the client's kept parts), checked against this round's request to this client.

    Each array leaves the record when it is read: a server holds no upload twice.

    Args:
        shapes: module -> (d_out, d_in) of the modules that the client holds. heads: the server's, by name and shape.

    Raises:
        RecordError: another protocol, another run or round, keys, shapes or types that were
            not requested, or bytes that do not match their declaration. The server checks values.
    """
    opened(record, "it", "this server")
    facts = _facts(record, "upload")
    if facts.get("run") != run or facts.get("round") != round:
        raise RecordError(
            f"it is of run {str(facts.get('run'))[:40]!r}, after round {str(facts.get('round'))[:9]}; {run!r} was "
            f"asked after round {round}."
        )
    expected = _expected(shapes, client.ranks(shapes), roles, heads)
    arrays = parts(record, ArrayRecord).get("arrays") or ArrayRecord()
    lacks, extra = sorted(set(expected) - set(arrays)), sorted(set(arrays) - set(expected))
    if lacks or extra:
        raise RecordError(f"{len(lacks)} tensors are missing {lacks[:2]}, {len(extra)} were not asked for {extra[:2]}.")
    found = {name: to_tensor(arrays.pop(name), shape, name) for name, shape in expected.items()}
    carried = shapes if "shared" in (roles.B, roles.A) else ()
    modules = {module: LoRA(found.get(f"B/{module}"), found.get(f"A/{module}")) for module in carried}
    adapter = Adapter(modules, {name: found[f"heads/{name}"] for name in heads if f"heads/{name}" in found})
    upload = Upload(client, number(record, "num-examples"), adapter)
    local = {*shapes, *heads} if "local" in (roles.B, roles.A, roles.heads) else set[str]()
    return upload, number(record, "loss"), kept_names(facts.get("kept"), local)


def _expected(
    shapes: Mapping[str, tuple[int, int]], ranks: Mapping[str, int], roles: Roles, heads: Mapping[str, Tensor]
) -> dict[str, tuple[int, ...]]:
    """Name -> shape, for the tensors that such clients send."""
    expected: dict[str, tuple[int, ...]] = {}
    for module, (d_out, d_in) in shapes.items():
        if roles.B == "shared":
            expected[f"B/{module}"] = (d_out, ranks[module])
        if roles.A == "shared":
            expected[f"A/{module}"] = (ranks[module], d_in)
    if roles.heads == "shared":
        expected |= {f"heads/{name}": tuple(head.shape) for name, head in heads.items()}
    return expected


def kept_names(listed: Any, local: Collection[str]) -> list[str]:
    """What a client says that it keeps: some of the local parts, each once."""
    if not isinstance(listed, list) or not all(isinstance(name, str) and name in local for name in listed):
        raise RecordError("its list of kept parts does not name local parts of this round.")
    if len(set(listed)) < len(listed):
        raise RecordError("its list of kept parts names a part twice.")
    return listed


def number(record: RecordDict, name: str) -> float:
    """A number among a reply's metrics. Raises `RecordError`."""
    for metrics in parts(record, MetricRecord).values():
        value = metrics.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    raise RecordError(f"it has no number {name!r} among its metrics.")


def _facts(record: RecordDict, what: str) -> dict[str, Any]:
    config = parts(record, ConfigRecord).get("config")
    text = config.get(what) if config is not None else None
    if not isinstance(text, str) or len(text) > 64 * 2**20:
        raise RecordError(f"the message is no {what} of {PROTOCOL}.")
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"the message's {what} is not JSON.") from error
    if not isinstance(facts, dict):
        raise RecordError(f"the message's {what} is no JSON object.")
    return facts
