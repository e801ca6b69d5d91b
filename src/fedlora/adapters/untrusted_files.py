"""Files from strangers: JSON and safetensors headers, read in bounded time and memory, or refused by name and reason.

safetensors cannot run code, but a header can still claim anything. Here it is read by itself, before any library opens
the file: how long it is, how many tensors it names, that names occur once and are names, and that the tensors lie end
to end up to the last byte.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlora.errors import AdapterFormatError

FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes of the data types that updates are made of
SIZES = {**FLOATS, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}  # and of a saved module's buffers
_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAME = re.compile(r"[^\s./\\\x00-\x1f\x7f]+(\.[^\s./\\\x00-\x1f\x7f]+)*")


@dataclass(frozen=True)
class Limits:
    """What a file may claim. header, json, total: bytes. tensors: how many. name: letters of a tensor's name."""

    header: int = 32 * 2**20
    json: int = 8 * 2**20
    tensors: int = 100_000
    total: int = 64 * 2**30
    name: int = 512


@dataclass(frozen=True)
class Stored:
    """One tensor by its header: data type, shape, and where in the file its bytes are."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    size: int


def read_json(path: Path, limits: Limits) -> dict[str, Any]:
    """A JSON object. Raises `AdapterFormatError`: too large, not JSON, a key twice, not an object."""
    size = _regular_size(path)
    if size > limits.json:
        raise AdapterFormatError(f"{path} has {size:,} bytes, more than the {limits.json:,} that such a file may have.")
    try:
        found = json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:  # a bad byte, a bad letter, a key twice, too deep, too many digits
        raise AdapterFormatError(f"{path} is not JSON: {_short(error)}.") from error
    if not isinstance(found, dict):
        raise AdapterFormatError(f"{path} holds no JSON object.")
    return found


def read_header(path: Path, limits: Limits) -> Mapping[str, Stored]:
    """The tensors of a safetensors file by its header, which is checked against the file's size.

    Raises:
        AdapterFormatError: no safetensors file, a damaged one, or one beyond `limits`.
    """
    size = _regular_size(path)
    if size > limits.total:
        raise AdapterFormatError(f"{path} has {size:,} bytes, more than the {limits.total:,} allowed.")
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if length < 2 or 8 + length > size:
            raise AdapterFormatError(
                f"{path} is damaged or no safetensors file: its header would have {length:,} bytes, "
                f"the file has {size:,}."
            )
        if length > limits.header:
            raise AdapterFormatError(
                f"{path} has a header of {length:,} bytes, more than the {limits.header:,} allowed."
            )
        raw = file.read(length)
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise AdapterFormatError(f"{path} is damaged: its header is not JSON ({_short(error)}).") from error
    if not isinstance(header, dict):
        raise AdapterFormatError(f"{path} is damaged: its header is no JSON object.")
    header.pop("__metadata__", None)
    if len(header) > limits.tensors:
        raise AdapterFormatError(f"{path} names {len(header):,} tensors, more than the {limits.tensors:,} allowed.")
    found = {name: _entry(path, name, entry, limits, 8 + length) for name, entry in header.items()}
    spans = sorted([(0, 0), *((s.begin - 8 - length, s.begin + s.size - 8 - length) for s in found.values())])
    for (_, end), (begin, _) in pairwise(spans):
        if begin != end:
            what = "overlap" if begin < end else "leave a gap"
            raise AdapterFormatError(f"{path} is damaged: two of its tensors {what} at byte {begin:,} of the data.")
    if spans[-1][1] != size - 8 - length:
        raise AdapterFormatError(
            f"{path} is damaged: its header tells of {spans[-1][1]:,} bytes of data, "
            f"and {size - 8 - length:,} are there."
        )
    return found


def type_name(dtype: torch.dtype) -> str:
    """A data type as safetensors calls it. Raises `AdapterFormatError` for one that adapters do not have."""
    for name, known in _TYPES.items():
        if known == dtype:
            return name
    raise AdapterFormatError(f"tensors of type {dtype} are not written; adapters hold {', '.join(_TYPES)}.")


def read_tensor(path: Path, stored: Stored) -> Tensor:
    """One tensor. Read, not mapped: a mapped file stays in memory as long as it is open, and merges open many.

    Raises:
        AdapterFormatError: the file has become shorter since its header was read, or cannot be read.
    """
    content = bytearray(stored.size)
    try:
        with path.open("rb") as file:
            file.seek(stored.begin)
            got = file.readinto(content)
    except OSError as error:
        raise AdapterFormatError(f"{path} cannot be read: {error.strerror or error}.") from error
    if got != stored.size:
        raise AdapterFormatError(f"{path} has changed while it was read.")
    if not stored.size:
        return torch.empty(stored.shape, dtype=_TYPES[stored.dtype])
    return torch.frombuffer(content, dtype=_TYPES[stored.dtype]).reshape(stored.shape)


def _entry(path: Path, name: str, entry: Any, limits: Limits, data: int) -> Stored:
    """One tensor's line of a header, checked by itself."""

    def refuse(why: str) -> AdapterFormatError:
        return AdapterFormatError(f"{path}: tensor {name[:80]!r} {why}.")

    if len(name) > limits.name or not _NAME.fullmatch(name):
        raise refuse("has a name that no module has: words with single dots between, no spaces and no slashes")
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise refuse("lacks dtype, shape or data_offsets in the header") from error
    if not isinstance(dtype, str) or dtype not in SIZES:
        raise refuse(f"is of type {str(dtype)[:20]}; adapters hold {', '.join(SIZES)}")
    if isinstance(shape, list) and len(shape) > 16:
        raise refuse(f"has {len(shape):,} dimensions; real tensors have a few")
    whole = [*(shape if isinstance(shape, list) else [None]), begin, end]
    if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**48 for n in whole) or begin > end:
        raise refuse("has a shape or a place in the file that no tensor can have")
    if math.prod(shape) * SIZES[dtype] != end - begin:
        raise refuse(f"should have {math.prod(shape) * SIZES[dtype]:,} bytes by its shape and has {end - begin:,}")
    return Stored(dtype, tuple(shape), data + begin, end - begin)


def _regular_size(path: Path) -> int:
    """Bytes of an ordinary file. A link may lead within its directory or into the hub's cache, nowhere else."""
    try:
        facts = path.lstat()
        if stat.S_ISLNK(facts.st_mode):
            target, home = path.resolve(strict=True), path.parent.resolve()
            in_cache = home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"
            if home not in target.parents and not in_cache:
                raise AdapterFormatError(f"{path} is a link to another place; an adapter's files lie in its directory.")
            facts = target.stat()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise AdapterFormatError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    if not stat.S_ISREG(facts.st_mode):
        raise AdapterFormatError(f"{path} is no ordinary file.")
    if not os.access(path, os.R_OK):
        raise AdapterFormatError(f"{path} cannot be read: permission denied.")
    return facts.st_size


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1) if len(names) < 10_000 else "..."
        raise ValueError(f"the key {twice[:80]!r} is there twice")
    return found


def _short(error: BaseException) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0][:200]
