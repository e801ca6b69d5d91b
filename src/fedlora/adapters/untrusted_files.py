"""The one place that opens strangers' files: a JSON object and a safetensors file, bounded before they are parsed.

safetensors runs no code, and its own parser checks that the tensors fill the file end to end. Before it looks, we bound
the file and its header, so that a refusal takes no memory. Numbers are read into memory of their own: a mapped file
would end the process if somebody cut it off meanwhile.
"""

from __future__ import annotations

import json
import math
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedlora.adapters.config import WAY_OUT
from fedlora.core.read_only import ReadOnly
from fedlora.core.text import quoted, shown
from fedlora.errors import AdapterFormatError
from fedlora.given_files import opened, parse_json, read_given

_MAX_BYTES = 64 * 2**30  # of a weights file; --max-bytes
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# A dense model of 405B parameters has 1,764 factors; Qwen3-30B-A3B with each of its experts 37,248, in a header of 6 MB
# and, with patterns, a config of 3 MB. These bounds keep a refusal within a second and a hundred megabytes.
_HEADER, _TENSORS = 8 * 2**20, 40_000
_ENTRY = b'"data_offsets"'  # once for each tensor
_JSON = 3 * 2**20
_PIECE = 8 * 2**20  # bytes of a large tensor to look at together


class Stored(NamedTuple):
    """One tensor's header entry. dtype: safetensors' name; begin, size: its bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    size: int


class TensorFile:
    """A safetensors file. `tensors`: name -> type, shape and place; the numbers are read on demand.

    Raises:
        AdapterFormatError: not an ordinary file, larger than `max_bytes` (64 GiB), damaged, or with a header beyond
            any adapter's.
    """

    def __init__(self, path: Path, max_bytes: int | None = None) -> None:
        most = max_bytes or _MAX_BYTES
        self.path, self._real = path, _real(path)
        try:
            with self._reading() as file:
                self.size = file.seek(0, 2)
                if self.size > most:
                    raise AdapterFormatError(
                        f"{path} has {self.size:,} bytes, more than the {most:,} allowed; "
                        f"--max-bytes {self.size} allows it."
                    )
                file.seek(0)
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= self.size - 8:
                    raise AdapterFormatError(
                        f"{path} is damaged or no safetensors file: it has {self.size:,} bytes, and its header would "
                        f"have {length:,}. Copy it again; `git lfs pull` replaces a pointer of git-lfs."
                    )
                raw = file.read(min(length, _HEADER))
                count = raw.count(_ENTRY)
                if length > _HEADER or count > _TENSORS:
                    raise AdapterFormatError(
                        f"{path} has a header of {length:,} bytes, with {count:,} tensors or more; up to {_HEADER:,} "
                        f"and {_TENSORS:,} are read. {WAY_OUT}."
                    )
                if raw.count(b",") > 10 * count + 1000:
                    raise ValueError("it has more values than its tensors need")
                safe_open(f"/dev/fd/{file.fileno()}", framework="pt")  # checks form, types, shapes, overlaps and gaps
            header = json.loads(raw, object_hook=lambda entry: _stored(entry, 8 + length))
            header.pop("__metadata__", None)
            if len(header) != count:
                raise ValueError("a tensor occurs twice")
            self.tensors: Mapping[str, Stored] = ReadOnly(header)
        except AdapterFormatError:
            raise
        except (ValueError, TypeError, AttributeError, LookupError, OverflowError, SafetensorError) as error:
            raise AdapterFormatError(f"{path} is damaged: its header cannot be read: {shown(error)}.") from error

    def tensor(self, name: str) -> Tensor:
        """One tensor, in memory of its own."""
        stored = self.tensors[name]
        with self._reading() as file:
            return self._piece(file, stored, 0, stored.size).reshape(stored.shape)

    def pieces(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor's numbers, each some millions at a time."""
        with self._reading() as file:
            for name, stored in self.tensors.items():
                for at in range(0, stored.size, _PIECE):
                    yield name, self._piece(file, stored, at, min(_PIECE, stored.size - at))

    @contextmanager
    def _reading(self) -> Iterator[BufferedReader]:
        try:
            with opened(self._real, links=False) as file:
                yield file
        except OSError as error:
            raise AdapterFormatError(f"{self.path} cannot be read: {error.strerror or error}.") from error

    def _piece(self, file: BufferedReader, stored: Stored, at: int, size: int) -> Tensor:
        if not size:
            return torch.empty(0, dtype=FLOATS[stored.dtype])
        content = bytearray(size)
        file.seek(stored.begin + at)
        if file.readinto(content) != size:
            raise AdapterFormatError(f"{self.path} has changed while being read.")
        return torch.frombuffer(content, dtype=FLOATS[stored.dtype])


def json_object(path: Path) -> dict[str, Any]:
    """A JSON object of at most 3 MiB.

    Raises:
        AdapterFormatError: too large, not JSON, a key twice, no object.
    """
    try:
        if not (raw := read_given(_real(path), _JSON)):
            raise AdapterFormatError(f"{path} is not JSON: it is empty. Copy it again.")
        found = parse_json(raw)
    except OSError as error:
        raise AdapterFormatError(f"{path} cannot be read: {error.strerror or error}.") from error
    except AdapterFormatError:
        raise
    except ValueError as error:
        raise AdapterFormatError(f"{path} is not JSON: {error}.") from error
    if not isinstance(found, dict):
        raise AdapterFormatError(f"{path} is not JSON: it holds no JSON object.")
    return found


def largest(name: str, numbers: Tensor) -> float:
    """The largest magnitude. Raises `AdapterFormatError` if one is NaN or Inf."""
    ends = [abs(float(end)) for end in torch.aminmax(numbers)] if numbers.numel() else [0.0]
    if not all(map(math.isfinite, ends)):
        raise AdapterFormatError(f"{quoted(name)} holds NaN or Inf.")
    return max(ends)


def _stored(entry: dict[str, Any], data: int) -> Any:
    """A tensor's entry, from the JSON object of one; any other object as it is."""
    if "data_offsets" not in entry:
        return entry
    begin, end = entry["data_offsets"]
    return Stored(sys.intern(entry["dtype"]), tuple(entry["shape"]), data + begin, end - begin)


def _real(path: Path) -> Path:
    """The file itself. A link may point within its directory or into the hub's cache, nowhere else."""
    try:
        real, facts = path, path.lstat()
        if stat.S_ISLNK(facts.st_mode):
            real, home = path.resolve(strict=True), path.parent.resolve()
            if home not in real.parents and real.parent != _blobs(home):
                raise AdapterFormatError(f"{path} is a link to another place; a file must be in its own directory.")
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
