"""What a base model is, as a digest of its tensors: the same for one file and for shards, another for one other byte.

Nothing is loaded: the bytes are read once, and again only when a file's size or times have changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedlora.core import files
from fedlora.errors import ConfigError
from fedlora.given_files import parse_json, read_given
from fedlora.training.hub_models import source

_MOST_HEADER = 100_000_000  # bytes; the largest that safetensors itself reads
_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def model_place(path: str | os.PathLike[str]) -> Path:
    """The directory or GGUF file of a model: of a hub id its snapshot in the cache, fetched where it is not there.

    Raises:
        ConfigError: there is no such model.
    """
    found = Path(path)
    if found.exists():
        return found
    from huggingface_hub import snapshot_download

    where = source(path)  # says what is wrong with an id that nobody has
    try:
        return Path(snapshot_download(os.fspath(path), allow_patterns=_PATTERNS, **where))
    except Exception as error:  # whatever its transport raises
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"the files of the model {os.fspath(path)!r} cannot be had: {reason}") from error


def weight_files(place: Path) -> list[Path]:
    """The files that the weights are loaded from. Raises `ConfigError`."""
    if place.is_file():
        return [place]
    single, index = place / "model.safetensors", place / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        try:
            shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            found = [place / str(name) for name in dict.fromkeys(shards)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"the index of the model's files, {index}, cannot be read: {error!r}.") from error
        lacks = [file.name for file in found if not file.is_file()]
        if not lacks and found:
            return sorted(found)
        raise ConfigError(f"the model {place} lacks {', '.join(lacks[:3]) or 'its files'}, which its index names.")
    raise ConfigError(f"the model {place} has no weights: neither {single.name} nor {index.name} is there.")


def base_digest(path: str | os.PathLike[str], cache: Path | None = None) -> str:
    """SHA-256 (hex) of a base model's weights: name, type, shape and bytes of each tensor, in the order of their names.

    A GGUF file counts as a whole, with what it says of architecture and tokenizer.

    Args:
        cache: a file that remembers digests by place, size and times of the files.

    Raises:
        ConfigError: no such model, or files that are no weights.
    """
    found = weight_files(model_place(path))
    key = json.dumps([_facts(file) for file in found])
    known = _known(cache)
    if key in known:
        return known[key]
    try:
        digest = _of_file(found[0]) if found[0].suffix == ".gguf" else _of_tensors(found)
    except OSError as error:
        raise ConfigError(f"the weights {error.filename or found[0]} cannot be read: {error.strerror}.") from error
    if cache is not None:
        with contextlib.suppress(OSError):  # a full disk costs the time to read them again
            files.write(cache, json.dumps({**dict(list(known.items())[-7:]), key: digest}, indent=1) + "\n")
    return digest


def _facts(file: Path) -> list[str | int]:
    real = file.resolve()
    found = real.stat()
    return [str(real), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _known(cache: Path | None) -> dict[str, str]:
    try:
        found = parse_json(read_given(cache)) if cache is not None else {}
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in found.items() if isinstance(v, str)} if isinstance(found, dict) else {}


def _of_file(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _of_tensors(found: list[Path]) -> str:
    tensors: dict[str, str] = {}
    for file in found:
        for name, line in _tensors(file).items():
            if name in tensors:
                raise ConfigError(f"the tensor {name[:100]!r} stands in two of the model's files, {file} being one.")
            tensors[name] = line
    whole = hashlib.sha256()
    for name in sorted(tensors):
        whole.update(f"{json.dumps(name)} {tensors[name]}\n".encode())
    return whole.hexdigest()


def _tensors(file: Path) -> dict[str, str]:
    """Name -> type, shape and digest, of a safetensors file."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= min(size - 8, _MOST_HEADER):
            raise ConfigError(
                f"{file} is no safetensors file: {size:,} bytes, and a header of {length:,} is announced."
            )
        try:
            header: Mapping[str, Any] = json.loads(stream.read(length))
            spans = {n: (t["dtype"], t["shape"], *t["data_offsets"]) for n, t in header.items() if n != "__metadata__"}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{file} is no safetensors file: its header cannot be read.") from error
        begin = 8 + length
        if any(not (isinstance(a, int) and isinstance(b, int) and 0 <= a <= b <= size - begin)
               for _, _, a, b in spans.values()):  # fmt: skip
            raise ConfigError(f"{file} is cut off: it has {size:,} bytes, and its header names tensors beyond them.")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
            return {
                name: f"{kind} {json.dumps(shape)} {hashlib.sha256(view[begin + a : begin + b]).hexdigest()}"
                for name, (kind, shape, a, b) in sorted(spans.items(), key=lambda item: item[1][2])
            }


__all__ = ["base_digest", "model_place", "weight_files"]
