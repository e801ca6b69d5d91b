"""Save and load values made of tensors and frozen dataclasses: one safetensors file, its digest in its name.

    round-00007.3f2a90c1d4e5b6a7.safetensors          tensors, and the tree around them as JSON in the metadata

The file is written whole or not at all (`files`). Its name carries the SHA-256 of its content, so damage shows. Its
metadata names the run, and a checkpoint of another run is refused. The reader supplies the types and the file refers to
them by name only, so a checkpoint cannot name code to run.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import types
import typing
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedlora.core import files
from fedlora.core.read_only import ReadOnly
from fedlora.errors import CheckpointError
from fedlora.linalg.stored import stored_bytes

T = TypeVar("T")

_FACTS = "checkpoint"
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_NAME = re.compile(r"round-(\d{5,})\.([0-9a-f]{16})\.safetensors")


def save(directory: Path, round: int, value: Any, *, of: str = "", keep: int = 2) -> Path:
    """Write `value` as the checkpoint of `round`, replacing any earlier one of that round, and remove all but the
    newest `keep`; never the one just written. of: the run it belongs to.

    Raises:
        CheckpointError: the value holds something that cannot be stored, or the disk refuses; older checkpoints stay.
    """
    tree, tensors = encoded(value)
    header = _header(tensors, json.dumps({"run": of, "tree": tree}))
    digest, size = hashlib.sha256(header), len(header)
    for tensor in tensors.values():
        digest.update(stored_bytes(tensor))
        size += tensor.nbytes
    path = directory / f"round-{round:05d}.{digest.hexdigest()[:16]}.safetensors"
    try:
        with files.replacing(path) as file:  # tensor by tensor: safetensors' `save` has all of it in memory twice more
            file.write(header)
            for tensor in tensors.values():
                file.write(stored_bytes(tensor))
        files.sweep(directory)
        _remove_older(directory, path, round, keep)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint of round {round} ({size:,} bytes) could not be written to {directory}: {error}. "
            f"Earlier checkpoints are untouched; free some space and resume."
        ) from error
    return path


def _header(tensors: Mapping[str, Tensor], facts: str) -> bytes:
    """The head of a safetensors file: its length, and as JSON each tensor's dtype, shape and place in what follows."""
    places: dict[str, Any] = {"__metadata__": {_FACTS: facts}}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(f"the tensor at {name} ({tensor.dtype}) cannot be stored in a checkpoint.")
        begin, end = end, end + tensor.nbytes
        places[name] = {"dtype": _DTYPES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, end]}
    text = json.dumps(places).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned
    return len(text).to_bytes(8, "little") + text


def _remove_older(directory: Path, newest: Path, round: int, keep: int) -> None:
    """Remove all checkpoints but `newest`, which is of `round`, and the newest `keep` - 1 of other rounds. A round that
    was stored again has its newer value alone."""
    others = [(other, old) for other, _, old in _listed(directory) if old != newest]
    kept = [old for other, old in others if other != round][: keep - 1]
    for _, old in others:
        if old not in kept:
            old.unlink()


def newest_round(directory: Path) -> int | None:
    """The round of the newest checkpoint, sound or not; None if there is none."""
    listed = _listed(directory)
    return listed[0][0] if listed else None


def load_newest(
    directory: Path,
    kind: type[T],
    *extra: type,
    of: str = "",
    upto: int | None = None,
    tell: Callable[[str], None] = warnings.warn,
) -> tuple[int, T] | None:
    """(round, value) of a run's newest sound checkpoint, as a `kind`; None if there is none. upto: the latest round to
    consider. of: the run, as given to `save`.

    Checkpoints that are damaged or belong to another run are skipped for the one before. `extra`: dataclasses that
    occur where the type says only `Any` (a method's own state). tell: receives the line that says what was skipped;
    by default a `UserWarning`.

    Raises:
        CheckpointError: there are checkpoints but none is sound.
    """
    listed = [entry for entry in _listed(directory) if upto is None or entry[0] <= upto]
    why: list[str] = []
    for round, digest, path in listed:
        try:
            return round, _read(path, digest, of, kind, extra)
        except CheckpointError as error:
            why.append(str(error))
            tell(f"{error} Trying the one before it.")
    if listed:
        raise CheckpointError(
            f"none of the {len(listed)} checkpoints in {directory} can be used. The newest: {why[0]} Restore one "
            f"from a backup, or start the run afresh."
        )
    return None


def _listed(directory: Path) -> list[tuple[int, str, Path]]:
    """(round, digest, path) of each checkpoint, newest first."""
    named = [(_NAME.fullmatch(path.name), path) for path in directory.glob("round-*.safetensors")]
    return sorted(((int(match[1]), match[2], path) for match, path in named if match), reverse=True)


def _read(path: Path, digest: str, of: str, kind: type[T], extra: tuple[type, ...]) -> T:
    try:
        found = files.digest(path)[:16]
    except OSError as error:
        raise CheckpointError(f"checkpoint {path.name} cannot be read: {error.strerror or error}.") from error
    if found != digest:
        raise CheckpointError(f"checkpoint {path.name} is damaged: its content does not match its digest.")
    try:
        with safe_open(path, framework="pt") as file:
            facts, names = json.loads(file.metadata()[_FACTS]), file.keys()
            # Each in memory of its own, as when it was computed: in the file's a tensor may begin at any byte, and BLAS
            # then rounds in another order.
            tensors = {name: file.get_tensor(name).clone() for name in names}
        if facts["run"] == of:
            return decoded(facts["tree"], tensors, kind, *extra)
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"checkpoint {path.name} does not hold a {kind.__name__}: {error}.") from error
    raise CheckpointError(
        f"checkpoint {path.name} is of another run (configuration, seed or data), {facts['run']!r}, and this one is "
        f"{of!r}."
    )


def encoded(value: Any) -> tuple[Any, dict[str, Tensor]]:
    """The value as JSON, and its tensors by their paths in it. Messages to sites use it too.

    Raises:
        CheckpointError: the value holds something that is neither.
    """
    tensors: dict[str, Tensor] = {}
    return _encode(value, "", tensors), tensors


def decoded(tree: Any, tensors: Mapping[str, Tensor], kind: type[T], *extra: type) -> T:
    """The value that `encoded` took apart. kind, extra: as in `load_newest`.

    Raises:
        KeyError, TypeError, ValueError: it is another's. RecursionError: it is nested too deep.
    """
    value: T = _decode(tree, tensors, {_name(cls): cls for cls in _dataclasses((kind, *extra))})
    if not isinstance(value, kind):
        raise ValueError(f"it is no {kind.__name__}")
    return value


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON; its tensors go to `tensors` under their paths."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_complex() or value.device.type == "meta":
            kind = f"{value.dtype}, {value.layout}, on {value.device}"
            raise CheckpointError(f"the tensor at {path or '/'} ({kind}) cannot be stored in a checkpoint.")
        tensors[path] = value.detach().cpu().contiguous()
        return {"tensor": path}
    if is_dataclass(value) and not isinstance(value, type):
        given = [f.name for f in fields(value) if f.init]  # the class computes the others from these
        inside = {name: _encode(getattr(value, name), _below(path, name), tensors) for name in given}
        return {"dataclass": _name(type(value)), "fields": inside}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise CheckpointError(f"a mapping at {path or '/'} has keys that are not strings; it cannot be stored.")
        return {"mapping": {key: _encode(item, _below(path, key), tensors) for key, item in value.items()}}
    if type(value) is tuple:  # a named tuple or torch.Size would come back as a plain tuple
        return {"tuple": [_encode(item, f"{path}/{k}", tensors) for k, item in enumerate(value)]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(float(value))}
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, Enum)):
        return value
    raise CheckpointError(f"a {type(value).__name__} at {path or '/'} cannot be stored in a checkpoint.")


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _below(path: str, key: str) -> str:
    """A path one step down, escaped like a JSON pointer so that a slash inside a key is no step."""
    return f"{path}/{key.replace('~', '~0').replace('/', '~1')}"


def _decode(tree: Any, tensors: Mapping[str, Tensor], known: Mapping[str, type]) -> Any:
    if not isinstance(tree, dict):
        return tree
    match tree:
        case {"tensor": path}:
            return tensors[path]
        case {"dataclass": name, "fields": inside}:
            if name not in known:
                raise ValueError(f"it holds a {name!r}, and the classes known here are {', '.join(sorted(known))}")
            return known[name](**{key: _decode(item, tensors, known) for key, item in inside.items()})
        case {"mapping": items}:
            return ReadOnly({key: _decode(item, tensors, known) for key, item in items.items()})
        case {"tuple": items}:
            return tuple(_decode(item, tensors, known) for item in items)
        case {"float": text}:
            return float(text)
    raise ValueError(f"unknown node {sorted(tree)}")


@cache  # their hints take milliseconds to read
def _dataclasses(hints: tuple[type, ...]) -> list[type]:
    """Every dataclass that type hints can hold, through unions, tuples, mappings and fields."""
    found: list[type] = []
    seen, left = set[Any](), list[Any](hints)
    while left:
        if (hint := left.pop()) in seen:
            continue
        seen.add(hint)
        left += typing.get_args(hint)
        if isinstance(hint, type) and is_dataclass(hint) and not isinstance(hint, types.GenericAlias):
            found.append(hint)
            left += typing.get_type_hints(hint).values()
    return found
