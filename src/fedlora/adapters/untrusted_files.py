"""Reads strangers' JSON and safetensors headers in bounded time and memory, or refuses them by name and reason.

safetensors cannot run code, but its header can claim anything. We parse the header ourselves before any library opens
the file: its length, the number of tensors, unique and valid names, and that the tensors fill the file end to end. A
file that changes between reads is refused.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import re
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from fedlora.adapters.limits import Limits
from fedlora.core.text import quoted
from fedlora.errors import AdapterFormatError
from fedlora.given_files import TooMuchJson, opened, parse_json

FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes per number, for types allowed in updates
SIZES = {**FLOATS, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}  # and in a saved module's buffers
_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAME = re.compile(r"[!-\-0-\[\]-~]++(?:\.[!-\-0-\[\]-~]++)*+")  # printable ASCII without dot, slashes and space
_PIECE = 8 * 2**20  # bytes of a large tensor to inspect at a time
_CALM = 100.0  # numbers up to this are always accepted, so no need to know which tensor has them


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor's header entry: data type, shape, and the place of its bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    size: int


class StrangersFile:
    """An ordinary file in its own directory or in the hub's cache, fixed to its state at construction.

    Each read opens it anew, so that any number can be in use at once, and raises if the file was replaced or modified.

    Raises:
        AdapterFormatError: it is a pipe, a device, a directory, or a link to another place; it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._real = _real(path)
        self._seen: tuple[int, ...] | None = None
        with self.reading():
            pass

    @property
    def size(self) -> int:
        """Bytes."""
        assert self._seen is not None
        return self._seen[2]

    @contextmanager
    def reading(self) -> Iterator[io.FileIO]:
        """The open file. Raises `AdapterFormatError` if it differs from its first state, before or after."""
        try:
            with opened(self._real, links=False) as buffered:
                file = cast("io.FileIO", buffered.raw)  # unbuffered: we seek for holes by descriptor
                self._check(file)
                yield file
                self._check(file)
        except OSError as error:
            raise AdapterFormatError(f"{self.path} cannot be read: {error.strerror or error}.") from error

    def read(self, begin: int, size: int) -> bytearray:
        """Exactly `size` bytes from `begin` on."""
        content = bytearray(size)
        with self.reading() as file:
            self._fill(file, begin, memoryview(content))
        return content

    def pieces(self, spans: Iterator[tuple[int, int, int]]) -> Iterator[tuple[int, memoryview]]:
        """(span's number, bytes) for each span (number, begin, end) of the file, up to 8 MiB at a time. Skips holes in
        the file, which read as zeros and take no disk, whatever their size."""
        content = memoryview(bytearray(_PIECE))
        with self.reading() as file:
            for number, begin, end in spans:
                at = begin
                while (at := _data_from(file, at, begin, end)) < end:
                    piece = content[: min(_PIECE, end - at)]
                    self._fill(file, at, piece)
                    yield number, piece
                    at += len(piece)

    def unchanged(self) -> None:
        """Raise `AdapterFormatError` if the file has changed."""
        with self.reading():
            pass

    def sha256(self) -> str:
        with self.reading() as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def _fill(self, file: io.FileIO, begin: int, into: memoryview) -> None:
        file.seek(begin)
        while into:
            got = file.readinto(into)
            if not got:
                raise AdapterFormatError(f"{self.path} has changed while being read.")
            into = into[got:]

    def _check(self, file: io.FileIO) -> None:
        facts = os.fstat(file.fileno())
        seen = (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
        if self._seen not in (None, seen):
            raise AdapterFormatError(f"{self.path} has changed while being read.")
        self._seen = seen


def read_json(path: Path, limits: Limits) -> dict[str, Any]:
    """A JSON object. Raises `AdapterFormatError`: too large, not JSON, a repeated key, not an object."""
    return json_of(StrangersFile(path), limits)


def json_of(file: StrangersFile, limits: Limits) -> dict[str, Any]:
    """As `read_json`."""
    limits.check("json", file.size, f"{file.path} has {file.size:,} bytes")
    return _object(bytes(file.read(0, file.size)), limits, f"{file.path} is not JSON")


def _object(raw: bytes, limits: Limits, otherwise: str) -> dict[str, Any]:
    """A JSON object. otherwise: the start of the error message, up to the reason."""
    try:
        found = parse_json(raw, depth=limits.depth, values=limits.values)
    except TooMuchJson as error:
        raise AdapterFormatError(
            f"{otherwise}: {error}; --limit {error.limit}{f'={error.found}' if error.found else ''} would allow it."
        ) from error
    except ValueError as error:
        raise AdapterFormatError(f"{otherwise}: {error}.") from error
    if not isinstance(found, dict):
        raise AdapterFormatError(f"{otherwise}: it holds no JSON object.")
    return found


def header_of(file: StrangersFile, limits: Limits) -> Mapping[str, Stored]:
    """A safetensors file's tensors from its header, checked against the file's size.

    Raises:
        AdapterFormatError: not a safetensors file, damaged, or beyond `limits`.
    """
    path, size = file.path, file.size
    limits.check("total", size, f"{path} has {size:,} bytes")
    length = struct.unpack("<Q", file.read(0, 8))[0] if size >= 8 else 0
    if length < 2 or 8 + length > size:
        raise AdapterFormatError(
            f"{path} is damaged or not a safetensors file: its header would have {length:,} bytes, but the file has "
            f"{size:,}."
        )
    limits.check("header", length, f"{path} has a header of {length:,} bytes")
    header = _object(bytes(file.read(8, length)), limits, f"{path} is damaged: its header is not JSON")
    data = 8 + length
    notes = header.pop("__metadata__", None)
    if notes is not None and not (isinstance(notes, dict) and all(isinstance(text, str) for text in notes.values())):
        raise AdapterFormatError(f"{path} is damaged: the __metadata__ in its header is not a table of strings.")
    limits.check("tensors", len(header), f"{path} names {len(header):,} tensors")
    found = {name: _entry(path, name, entry, limits, data) for name, entry in header.items()}
    spans = sorted([(0, 0), *((s.begin - data, s.begin + s.size - data) for s in found.values())])
    for (_, end), (begin, _) in pairwise(spans):
        if begin != end:
            what = "overlap" if begin < end else "leave a gap"
            raise AdapterFormatError(f"{path} is damaged: two of its tensors {what} at byte {begin:,} of the data.")
    if spans[-1][1] != size - data:
        raise AdapterFormatError(
            f"{path} is damaged: its header announces {spans[-1][1]:,} bytes of data, but it holds {size - data:,}."
        )
    return found


def type_name(dtype: torch.dtype) -> str:
    """A data type's safetensors name. Raises `AdapterFormatError` for types that adapters do not have."""
    for name, known in _TYPES.items():
        if known == dtype:
            return name
    raise AdapterFormatError(f"fedlora does not write tensors of type {dtype}; adapters hold {', '.join(_TYPES)}.")


def tensor_of(file: StrangersFile, stored: Stored) -> Tensor:
    """One tensor. We read instead of mapping: a mapped file stays in memory while open, and merges open many.

    Raises:
        AdapterFormatError: the file has changed since its header was read, or cannot be read.
    """
    if not stored.size:
        file.unchanged()
        return torch.empty(stored.shape, dtype=_TYPES[stored.dtype])
    return decoded(file.read(stored.begin, stored.size), stored.dtype, stored.shape)


def decoded(content: bytes | bytearray, dtype: str, shape: Sequence[int]) -> Tensor:
    """Decode bytes into a tensor; `dtype` is the safetensors name."""
    if not content:
        return torch.empty(tuple(shape), dtype=_TYPES[dtype])
    own = bytearray(content) if isinstance(content, bytes) else content
    return torch.frombuffer(own, dtype=_TYPES[dtype]).reshape(tuple(shape))


def largest(tensor: Tensor) -> float:
    """The largest absolute value: 0 if the tensor is empty, NaN or Inf if it contains one."""
    if not tensor.numel():
        return 0.0
    least, most = (float(x) for x in torch.aminmax(tensor))
    return max(-least, most) if least == least else least


def largest_of_each(file: StrangersFile, header: Mapping[str, Stored]) -> dict[str, float]:
    """Key -> an upper bound on absolute values, for all floating-point tensors; reads each byte once, in pieces.

    Adjacent tensors of one type are inspected together; only if one exceeds 100 is each inspected by itself.
    """
    floats = sorted((item for item in header.items() if item[1].dtype in FLOATS), key=lambda item: item[1].begin)
    runs = [list(run) for _, run in groupby(_numbered(floats), key=lambda item: item[0])]
    spans = ((k, run[0][2].begin, run[-1][2].begin + run[-1][2].size) for k, run in enumerate(runs))
    types = [_TYPES[run[0][2].dtype] for run in runs]
    sizes = _largest_in(file, spans, types)
    found: dict[str, float] = {}
    wild = []
    for k, run in enumerate(runs):
        if len(run) > 1 and not sizes.get(k, 0.0) <= _CALM:
            wild += run
        else:
            found |= dict.fromkeys((key for _, key, _ in run), sizes.get(k, 0.0))
    each = _largest_in(
        file, ((k, s.begin, s.begin + s.size) for k, (_, _, s) in enumerate(wild)), [_TYPES[s.dtype] for *_, s in wild]
    )
    return found | {key: each.get(k, 0.0) for k, (_, key, _) in enumerate(wild)}


def same_bytes(file: StrangersFile, one: Stored, other: Stored) -> bool:
    """Whether two tensors of a file have the same type, shape and bytes. Reads in pieces and skips holes."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    at, begins, size = 0, (one.begin, other.begin), one.size
    with file.reading() as source:
        while (at := min(_data_from(source, b + at, b, b + size) - b for b in begins)) < size:
            first, second = (os.pread(source.fileno(), min(_PIECE, size - at), b + at) for b in begins)
            if not first or first != second:
                return False
            at += len(first)
    return True


def _numbered(floats: list[tuple[str, Stored]]) -> Iterator[tuple[int, str, Stored]]:
    """(run's number, key, stored): a run has one type and no gaps."""
    number, before = 0, None
    for key, stored in floats:
        if before is not None and (before.dtype != stored.dtype or before.begin + before.size != stored.begin):
            number += 1
        before = stored
        yield number, key, stored


def _largest_in(
    file: StrangersFile, spans: Iterator[tuple[int, int, int]], types: list[torch.dtype]
) -> dict[int, float]:
    found: dict[int, float] = {}
    for number, piece in file.pieces(spans):
        size, before = largest(torch.frombuffer(piece, dtype=types[number])), found.get(number, 0.0)
        found[number] = before if size <= before or math.isnan(before) else size  # NaN stays
    return found


def _data_from(file: io.FileIO, at: int, begin: int, end: int) -> int:
    """The first offset from `at` on that is not in a hole, at a multiple of 8 bytes from `begin`."""
    if at >= end:
        return at
    try:
        data = os.lseek(file.fileno(), at, os.SEEK_DATA)
    except OSError as error:
        return end if error.errno == 6 else at  # ENXIO: only a hole follows
    return max(at, data - (data - begin) % 8)


def _entry(path: Path, name: str, entry: Any, limits: Limits, data: int) -> Stored:
    """One tensor's header entry, checked on its own."""

    def refuse(why: str) -> AdapterFormatError:
        return AdapterFormatError(f"{path}: tensor {quoted(name, 80)} {why}.")

    if len(name) > limits.name or not _NAME.fullmatch(name):
        raise refuse(
            "has an impossible name: names are ASCII words with single dots between, without spaces or slashes, up to "
            f"{limits.name} letters (--limit name)"
        )
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise refuse("lacks dtype, shape or data_offsets in the header") from error
    if not isinstance(dtype, str) or dtype not in SIZES:
        raise refuse(f"is of type {quoted(dtype, 20).strip(chr(39))}; adapters hold {', '.join(SIZES)}")
    if isinstance(shape, list) and len(shape) > limits.dimensions:
        raise refuse(f"has {len(shape):,} dimensions, more than the {limits.dimensions} allowed (--limit dimensions)")
    for number in (*shape, begin, end) if isinstance(shape, list) else (None,):
        if type(number) is not int or not 0 <= number < 2**48 or begin > end:
            raise refuse("has an impossible shape or place in the file")
    size = math.prod(shape) * SIZES[dtype]
    if size != end - begin:
        raise refuse(f"should have {size:,} bytes by its shape but has {end - begin:,}")
    return Stored(dtype, tuple(shape), data + begin, end - begin)


def _real(path: Path) -> Path:
    """The file itself. A link may point within its directory or into the hub's cache, nowhere else."""
    try:
        facts = path.lstat()
        real = path
        if stat.S_ISLNK(facts.st_mode):
            real, home = path.resolve(strict=True), path.parent.resolve()
            if home not in real.parents and real.parent != _blobs(home):
                raise AdapterFormatError(
                    f"{path} is a link to another place; an adapter's files must be in its directory."
                )
            facts = real.lstat()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise AdapterFormatError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    if not stat.S_ISREG(facts.st_mode):
        raise AdapterFormatError(f"{path} is not an ordinary file.")
    return real


def _blobs(home: Path) -> Path | None:
    """The folder in the hub's cache that models--A--B/snapshots/REVISION/... links to: models--A--B/blobs."""
    for place in home.parents:
        if place.name == "snapshots" and place.parent.name.startswith("models--"):
            return place.parent / "blobs"
    return None
