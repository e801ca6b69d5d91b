"""The full model with an adapter written into it, for serving without PEFT; or only whether that can be done.

One tensor in memory at a time: what the adapter leaves alone is copied piece by piece, what it changes is computed
(`weight_changes`), and each shard is written once, from its header on.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fedlora.adapters.base_model import CONFIG, INDEX, SINGLE, BaseFiles, SideFile, copy_side_file
from fedlora.adapters.fit import Change, Plan, planned
from fedlora.adapters.full_card import CARD, full_card
from fedlora.adapters.head_config import FindClass, HeadFacts, head_facts, unknown
from fedlora.adapters.mark import marked, only_by
from fedlora.adapters.reader import AdapterFile
from fedlora.adapters.untrusted_files import FLOATS, StrangersFile, type_name
from fedlora.adapters.weight_changes import Rounding, changed
from fedlora.core import files
from fedlora.core.folders import FolderKind, check_target, replacing_folder
from fedlora.errors import AdapterFormatError, ConfigError
from fedlora.linalg.stored import stored_bytes

_APPLY = "fedlora apply"
Progress = Callable[[Sequence[str]], Iterable[str]]
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
_FLOAT_TYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}


@dataclass(frozen=True)
class Applied:
    """What `apply` does, or would do.

    changed, added: names of tensors. left_out: files of the base model that are not part of the result, with reasons.
    notes: lines for a reader. loss: of the update by rounding it to the type that is written, relative. worst: the
    tensor that loses most, and how much. vanished: tensors in which nothing of the update is left.
    """

    changed: tuple[str, ...]
    added: tuple[str, ...]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    loss: float
    worst: tuple[str, float]
    vanished: tuple[str, ...]


def check_adapter(
    file: AdapterFile, base: BaseFiles, dtype: torch.dtype | None = None, progress: Progress = iter
) -> Applied:
    """The judgement of `apply_adapter`, without writing: every changed tensor is computed.

    Raises:
        AdapterFormatError: the adapter does not fit the base model. ConfigError: the base model's files are unsound.
    """
    _, left_out = base.side_files()
    plan = planned(file, base)
    costs: dict[str, Rounding] = {}
    for name in progress([*plan.changes, *plan.added]):
        costs[name] = _value(plan, base, name, dtype)[1]
    return _applied(plan, left_out, costs)


def apply_adapter(
    file: AdapterFile,
    base: BaseFiles,
    out: Path,
    dtype: torch.dtype | None = None,
    progress: Progress = iter,
    *,
    force: bool = False,
    find: FindClass = unknown,
) -> Applied:
    """Write the base model with the adapter in it to `out`; tell what was changed, added and left out.

    Args:
        dtype: of all floating-point tensors of the result; None: as the base model has them.
        force: a model of the same files that `apply` wrote is replaced.
        find: knows which class has a head (`training.head_classes`), for config.json.

    Raises:
        AdapterFormatError: the adapter does not fit the base model. ConfigError: `out` is not empty, lies in one of the
            inputs, or cannot be written.
    """
    kept, left_out = base.side_files()
    how: Any = {"force": force, "kind": model_folder(kept), "inputs": [file.directory, base.directory]}
    _refuse_inside(file.directory, base.directory, out)
    check_target(out, **how)
    plan = planned(file, base)
    heads = {h: file.stored_head(h).shape for h in file.heads if file.kind(h) == "head"}
    head = head_facts(file, base.config, heads, bool(plan.added), find)
    with replacing_folder(out, **how) as building:
        costs = _write_model(plan, base, building, kept, dtype, progress, head)
        files.write(building / CARD, full_card(file, _card_of(kept), len(plan.changes), len(plan.added), head))
    return _applied(replace(plan, notes=(*plan.notes, *head.notes)), left_out, costs)


def model_folder(kept: Sequence[SideFile]) -> FolderKind:
    """What `apply_adapter` writes for a base model with these files beside its weights."""
    copied = "|".join(re.escape(file.name) for file in kept)
    shards = r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"
    mark = only_by(_APPLY, "model*.safetensors")
    own = f"{shards}|{re.escape(CONFIG)}|{re.escape(CARD)}"
    return FolderKind("a model that apply writes for this base", CONFIG, f"{own}|{copied}", mark)


def _refuse_inside(adapter: Path, base: Path, out: Path) -> None:
    """Raises `ConfigError` where the result would lie in one of the folders that it is made from."""
    place = Path(os.path.realpath(out))
    for name, folder in (("the adapter", adapter), ("the base model", base)):
        if Path(os.path.realpath(folder)) in (place, *place.parents):
            raise ConfigError(f"{out} is the folder of {name}, or lies in it; name another directory.")


def _applied(plan: Plan, left_out: Sequence[str], costs: Mapping[str, Rounding]) -> Applied:
    update, lost = (math.hypot(*(getattr(cost, what) for cost in costs.values())) for what in ("update", "lost"))
    worst = max(costs, key=lambda name: costs[name].loss, default="")
    return Applied(
        changed=tuple(sorted(plan.changes)),
        added=tuple(sorted(plan.added)),
        left_out=tuple(left_out),
        notes=plan.notes,
        loss=Rounding(update, lost).loss,
        worst=(worst, costs[worst].loss if worst else 0.0),
        vanished=tuple(sorted(name for name, cost in costs.items() if cost.vanished)),
    )


def _value(plan: Plan, base: BaseFiles, name: str, dtype: torch.dtype | None) -> tuple[Tensor, Rounding]:
    """A changed or added tensor of the result."""
    change = plan.changes.get(name) or plan.added[name]
    before = _start(change, base)
    return changed(name, before, change.steps, dtype or before.dtype)


def _start(change: Change, base: BaseFiles) -> Tensor:
    if change.source is not None:
        return base.tensor(change.source)
    step: Any = change.steps[0]
    value: Tensor = step.file.head(step.head)
    return value  # replaced by itself: what is added has no base


# ---------------------------------------------------------------------------------------------------------------- files


def _write_model(
    plan: Plan,
    base: BaseFiles,
    folder: Path,
    kept: Sequence[SideFile],
    dtype: torch.dtype | None,
    progress: Progress,
    head: HeadFacts,
) -> dict[str, Rounding]:
    """All files of the result but its card; returns what rounding has cost each changed tensor."""
    for file in kept:
        if file.name not in (CONFIG, CARD):
            copy_side_file(file, folder / file.name)
    if base.config:
        files.write(folder / CONFIG, json.dumps({**_config(base.config, plan, dtype), **head.fields}, indent=2) + "\n")
    costs: dict[str, Rounding] = {}
    total = len(base.shards) + bool(plan.added)
    names = [f"model-{k + 1:05d}-of-{total:05d}.safetensors" if total > 1 else SINGLE for k in range(total)]
    weight_map: dict[str, str] = {}
    size = 0
    for shard, name in zip(progress(base.shards), names, strict=False):
        held = base.of_shard(shard)
        size += _write_shard(folder / name, held, plan, base, dtype, costs)
        weight_map |= dict.fromkeys(held, name)
    if plan.added:
        size += _write_shard(folder / names[-1], sorted(plan.added), plan, base, dtype, costs)
        weight_map |= dict.fromkeys(plan.added, names[-1])
    if total > 1:
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        files.write(folder / INDEX, json.dumps(index, indent=2) + "\n")
    return costs


def _card_of(kept: Sequence[SideFile]) -> str:
    """The base model's own card, "" where it has none."""
    for file in kept:
        if file.name == CARD:
            source = StrangersFile(file.source)
            return bytes(source.read(0, source.size)).decode(errors="replace")
    return ""


def _config(config: Mapping[str, Any], plan: Plan, dtype: torch.dtype | None) -> dict[str, Any]:
    """The base model's config.json, with what the result changes of it."""
    written = dict(config)
    if plan.untied:
        written["tie_word_embeddings"] = False
    if dtype is not None:
        short = str(dtype).removeprefix("torch.")
        written = {"torch_dtype": short} | _retyped(written, short)
    return written


def _retyped(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The data type that a config and those of its parts name, exchanged."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        found[key] = dtype if key in ("dtype", "torch_dtype") else value
        if key.endswith("_config") and isinstance(value, Mapping):
            found[key] = _retyped(value, dtype)
    return found


def _write_shard(
    path: Path,
    names: Sequence[str],
    plan: Plan,
    base: BaseFiles,
    dtype: torch.dtype | None,
    costs: dict[str, Rounding],
) -> int:
    """One safetensors file, tensor after tensor; returns the bytes of its tensors."""
    header: dict[str, Any] = {"__metadata__": marked(_APPLY)}
    end = 0
    for name in names:
        kind, shape, size = _described(plan, base, name, dtype)
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("xb") as target:
        target.write(struct.pack("<Q", len(raw)) + raw)
        for name in names:
            _write_tensor(target, plan, base, name, dtype, costs)
        target.flush()
        os.fsync(target.fileno())
    return end


def _described(plan: Plan, base: BaseFiles, name: str, dtype: torch.dtype | None) -> tuple[str, tuple[int, ...], int]:
    """(type, shape, bytes) of a tensor of the result, before it is made."""
    change = plan.changes.get(name) or plan.added.get(name)
    source = name if change is None else change.source
    if source is not None:
        stored = base.stored(source)
        kind, shape = stored.dtype, stored.shape
    else:
        start = _start(change, base) if change is not None else torch.empty(0)
        kind, shape = type_name(start.dtype), tuple(start.shape)
    if dtype is not None and kind in FLOATS:
        kind = type_name(dtype)
    count = 1
    for n in shape:
        count *= n
    width = FLOATS.get(kind)
    if width is not None:
        return kind, shape, count * width
    return kind, shape, base.stored(source).size if source is not None else start.numel() * start.element_size()


def _write_tensor(
    target: BinaryIO,
    plan: Plan,
    base: BaseFiles,
    name: str,
    dtype: torch.dtype | None,
    costs: dict[str, Rounding],
) -> None:
    if name in plan.changes or name in plan.added:
        value, costs[name] = _value(plan, base, name, dtype)
        target.write(stored_bytes(value))
        return
    stored = base.stored(name)
    if dtype is not None and stored.dtype in FLOATS and _FLOAT_TYPES[stored.dtype] != dtype:
        target.write(stored_bytes(_converted(name, base.tensor(name), dtype)))
        return
    for piece in base.pieces(name):
        target.write(piece)


def _converted(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    after = value.to(dtype)
    if not torch.equal(torch.isfinite(after), torch.isfinite(value)):
        most = float(value[torch.isfinite(value)].abs().max())
        raise AdapterFormatError(
            f"the base model's {name!r} holds {most:.6g}, beyond {str(dtype).removeprefix('torch.')}'s largest number "
            f"{torch.finfo(dtype).max:.6g}; name another --dtype."
        )
    return after
