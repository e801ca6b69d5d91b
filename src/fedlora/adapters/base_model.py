"""A full model's safetensors files: do adapters fit it, and the model with an adapter written into it.

One tensor in memory at a time: each shard is copied piece by piece, and only what the adapter changes is read as
numbers. Knows file names and shapes; knows no transformers.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

from fedlora.adapters.layouts import Layout
from fedlora.adapters.reader import AdapterFile
from fedlora.adapters.untrusted_files import Limits, read_header, read_json
from fedlora.core import files
from fedlora.errors import AdapterFormatError, ConfigError

Change = Callable[[Tensor], Tensor]
_CONV1D = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "ctrl")  # models of transformers' Conv1D
_CONV1D_LAYERS = ("c_attn", "c_proj", "c_fc", "q_attn")
_INDEX = "model.safetensors.index.json"


class BaseFiles:
    """The safetensors files of a model directory.

    Raises:
        ConfigError: there are none, or they cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        limits = Limits(total=2**45, tensors=1_000_000, header=2**28)
        index, single = directory / _INDEX, directory / "model.safetensors"
        try:
            names = ["model.safetensors"] if single.is_file() else sorted(
                set(read_json(index, limits)["weight_map"].values()) if index.is_file() else ())  # fmt: skip
            if not names or any("/" in name or not (directory / name).is_file() for name in names):
                raise ConfigError(f"{directory} is no model directory: it has no complete safetensors weights.")
            self._of: dict[str, str] = {}
            self._shapes: dict[str, tuple[int, ...]] = {}
            for name in names:
                for tensor, stored in read_header(directory / name, limits).items():
                    self._of[tensor], self._shapes[tensor] = name, stored.shape
        except (AdapterFormatError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"the base model in {directory} cannot be read: {error}") from error
        self.shards: Sequence[str] = names
        described = directory / "config.json"
        self.config: Mapping[str, Any] = read_json(described, Limits()) if described.is_file() else {}

    def find(self, name: str) -> str | None:
        """The stored name of a parameter: its own, or without the outermost module, as encoders are stored alone."""
        inner = name.partition(".")[2]
        return name if name in self._of else inner if inner in self._of else None

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def shard(self, name: str) -> str:
        return self._of[name]

    def weight_of(self, path: str, layout: Layout) -> str:
        """The stored name of the weight that a pair updates. Raises `AdapterFormatError` where there is none."""
        wanted = layout.pattern if layout.kind == "parameter" else f"{path}.weight"
        found = self.find(wanted)
        if found is None:
            raise AdapterFormatError(
                f"the base model in {self.directory} has no {wanted!r}: another model, or a weight tied to another one "
                f"and not stored. It has {', '.join(list(self._of)[:3])}, ..."
            )
        return found


def check_fit(where: Path, path: str, layout: Layout, update: tuple[int, int], weight: tuple[int, ...]) -> None:
    """Raises `AdapterFormatError` unless an update (d_out, d_in) can be added to a weight of that shape."""
    if layout.kind == "conv":
        have: list[tuple[int, ...]] = [(weight[0], math.prod(weight[1:]))]
    elif layout.kind == "parameter":
        have = [weight[-2:], weight[-2:][::-1]]
        if len(weight) == 3 and weight[0] != layout.experts:
            have = []
    elif layout.kind == "embedding":
        have = [weight[::-1]]
    else:
        have = [weight, weight[::-1]]  # Conv1D keeps its weights transposed
    if tuple(update) not in have:
        raise AdapterFormatError(
            f"{where}: module {path!r} is an update of {update}, but the base model's weight is {weight}: "
            f"the adapter is of another model."
        )


def apply_adapter(
    file: AdapterFile, base: BaseFiles, out: Path, progress: Callable[[Sequence[str]], Iterable[str]] = iter
) -> list[str]:
    """Write the base model with the adapter in it to `out`; return the names of what was changed or added.

    Raises:
        AdapterFormatError: the adapter does not fit the base model. ConfigError: `out` is not empty, or cannot be
            written.
    """
    _check_tied(file, base)
    if file.config.get("layer_replication"):
        raise AdapterFormatError(f"{file.directory}: layer_replication makes another model, which is not written here.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not empty; name another directory.")
    changes, added = _changes(file, base)
    out = out.absolute()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise ConfigError(f"the model cannot be written to {out}: {error.strerror or error}.") from error
    try:
        for path in sorted(base.directory.iterdir()):
            if (
                path.is_file()
                and path.suffix not in (".safetensors", ".bin", ".pt", ".h5", ".gguf")
                and path.name != _INDEX
            ):
                shutil.copy(path, beside / path.name)
        _write_shards(base, beside, changes, added, progress)
        if out.exists():
            out.rmdir()
        beside.chmod(0o755)
        beside.rename(out)
    except OSError as error:
        raise ConfigError(f"the model cannot be written to {out}: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return [*changes, *added]


def _changes(file: AdapterFile, base: BaseFiles) -> tuple[dict[str, Change], dict[str, Tensor]]:
    """Stored name -> how its tensor changes, and what the base model does not have."""
    changes: dict[str, Change] = {}
    for path, layout in file.layouts.items():
        name = base.weight_of(path, layout)
        B, A = file.lora(layout.modules(path)[0]).factors
        check_fit(file.directory, path, layout, (B.shape[0], A.shape[1]), base.shape(name))
        if name in changes:
            raise AdapterFormatError(f"{file.directory}: two of its modules are the one stored weight {name!r}.")
        square = layout.kind == "linear" and len(set(base.shape(name))) == 1
        changes[name] = _update(file, path, layout, flipped=square and _transposed(file, base, path))
    added: dict[str, Tensor] = {}
    for head in sorted(file.heads, key=lambda path: file.kind(path) == "added"):  # what replaces first, then what adds
        kind, value = file.kind(head), file.head(head)
        plain = head.replace(".base_layer.", ".")
        if kind == "added":
            plain = f"{head.removesuffix('.lora_B.bias')}.bias"
        if kind == "tokens":
            plain = head.replace(".token_adapter.trainable_tokens_delta", ".weight")
        found = base.find(plain)
        if kind in ("added", "tokens") and found is None:
            raise AdapterFormatError(
                f"{file.directory}: {head!r} changes {plain!r}, which the base model does not have."
            )
        if found is None:
            added[plain] = value
            continue
        before = changes.get(found)
        changes[found] = _combined(before, kind, value, _token_rows(file, plain) if kind == "tokens" else [])
    return changes, added


def _combined(before: Change | None, kind: str, value: Tensor, rows: Sequence[int]) -> Change:
    """A tensor beside the pairs put in place; an update of the same weight comes after what replaces it."""

    def change(weight: Tensor) -> Tensor:
        if kind == "added":
            before_it = before(weight) if before is not None else weight
            return (before_it.double() + value.double()).to(weight.dtype)
        if kind == "tokens":
            weight = weight.clone()
            weight[list(rows)] = value.to(weight.dtype)
        else:
            weight = value.to(weight.dtype)
        return before(weight) if before is not None else weight

    return change


def _check_tied(file: AdapterFile, base: BaseFiles) -> None:
    """Raises `AdapterFormatError` for an embedding trained in full on a base that has no head of its own: the head
    would become another one with it."""
    saved = [path for path in file.heads if file.kind(path) == "head" and ("embed" in path or "wte" in path)]
    ties = base.config.get("tie_word_embeddings", False) is True
    if saved and ties and base.find("lm_head.weight") is None and "lm_head.weight" not in file.heads:
        raise AdapterFormatError(
            f"{file.directory} trained {saved[0]!r} in full, and the base model has no head of its own but "
            f"ties it to the embedding: written into it, the adapter would change the head too. Merge it with "
            f"peft's merge_and_unload."
        )


def _transposed(file: AdapterFile, base: BaseFiles, path: str) -> bool:
    """Whether a square weight is kept as (d_in, d_out). The config's fan_in_fan_out is of one layer only, so the base
    model's type decides."""
    conv1d = base.config.get("model_type") in _CONV1D and path.rpartition(".")[2] in _CONV1D_LAYERS
    if bool(file.config.get("fan_in_fan_out")) and base.config.get("model_type") not in _CONV1D:
        raise AdapterFormatError(
            f"{path!r} is square, and which way round this base model ({base.config.get('model_type')}) keeps it is "
            f"not known here. Merge this adapter with peft's merge_and_unload."
        )
    return conv1d


def _token_rows(file: AdapterFile, weight: str) -> list[int]:
    indices: Any = file.config.get("trainable_token_indices")
    if isinstance(indices, Mapping):
        module = weight.removesuffix(".weight")
        indices = next((rows for name, rows in indices.items() if f".{module}".endswith(f".{name}")), None)
    if not isinstance(indices, list) or not all(isinstance(row, int) and row >= 0 for row in indices):
        raise AdapterFormatError(f"{file.directory}: trainable_token_indices does not say which rows of {weight!r}.")
    return indices


def _update(file: AdapterFile, path: str, layout: Layout, *, flipped: bool) -> Change:
    def change(weight: Tensor) -> Tensor:
        updates = []
        for module in layout.modules(path):
            lora = file.lora(module).map(Tensor.float)
            updates.append(lora.delta())
        delta = torch.stack(updates) if layout.kind == "parameter" else updates[0]
        if layout.kind == "parameter" and weight.dim() == 3 and weight.shape[1] == weight.shape[2]:
            raise AdapterFormatError(
                f"{path!r}: its experts are square {tuple(weight.shape)}, so which way round the model keeps them "
                f"cannot be told without its code. Merge this adapter with peft's merge_and_unload."
            )
        if layout.kind == "parameter" and weight.dim() == 2:
            delta = delta[0]
        if layout.kind == "conv":
            delta = delta.reshape(weight.shape)
        elif delta.shape != weight.shape or flipped or layout.kind == "embedding":
            delta = delta.mT
        return (weight.float() + delta).to(weight.dtype) if weight.dtype != torch.float64 else weight + delta.double()

    return change


def _write_shards(
    base: BaseFiles,
    target: Path,
    changes: Mapping[str, Change],
    added: Mapping[str, Tensor],
    progress: Callable[[Sequence[str]], Iterable[str]],
) -> None:
    """Every shard with its changed tensors; what is new goes to a shard of its own."""
    total = len(base.shards) + bool(added)
    names = [
        f"model-{k + 1:05d}-of-{total:05d}.safetensors" if total > 1 else "model.safetensors" for k in range(total)
    ]
    weight_map: dict[str, str] = {}
    size = 0
    for shard, name in zip(progress(base.shards), names, strict=False):
        header = _copy_shard(base.directory / shard, target / name, changes)
        weight_map |= dict.fromkeys(header, name)
        size += (target / name).stat().st_size
    if added:
        _write_added(target / names[-1], added)
        weight_map |= dict.fromkeys(added, names[-1])
    if total > 1:
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        files.write(target / _INDEX, json.dumps(index, indent=2) + "\n")


def _copy_shard(source: Path, target: Path, changes: Mapping[str, Change]) -> list[str]:
    """A copy of a safetensors file in which some tensors have other values; the layout stays, byte for byte."""
    shutil.copyfile(source, target)
    with target.open("rb") as stream:
        length = struct.unpack("<Q", stream.read(8))[0]
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    with safe_open(source, framework="pt") as tensors, target.open("r+b") as stream:
        for name in (name for name in header if name in changes):
            before = tensors.get_tensor(name)
            if not before.is_floating_point():
                raise AdapterFormatError(
                    f"the base model's {name!r} is {before.dtype}: quantised weights cannot take it."
                )
            after = changes[name](before)
            if after.shape != before.shape:
                raise AdapterFormatError(
                    f"the base model's {name!r} has shape {tuple(before.shape)}, the adapter's {tuple(after.shape)}: "
                    f"the vocabulary or the labels were changed. Save the base model so, and apply to that."
                )
            stream.seek(8 + length + header[name]["data_offsets"][0])
            stream.write(_bytes(after))
        stream.flush()
        os.fsync(stream.fileno())
    return list(header)


def _write_added(path: Path, added: Mapping[str, Tensor]) -> None:
    safetensors.torch.save_file({name: t.contiguous() for name, t in added.items()}, path, metadata={"format": "pt"})


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
